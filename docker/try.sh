#!/usr/bin/env bash
# try.sh [MODEL [OPTION…]]: start batchtune-server with a model, a directory with numbered version directories (without one a
# model that is emulated), load it by batchtune in a second container, and stop it. The options are those of
# `batchtune load`. After build.sh; ENGINE as there. The server listens on the loopback only, with buildah this machine's.
set -euo pipefail
model=${1:-}
[ $# = 0 ] || shift
if [ -n "$model" ]; then
    # A file or a directory without versions is never served: the health check would stay red.
    compgen -G "$model/[0-9]*" >/dev/null || { echo "error: $model: no directory with numbered version directories" >&2; exit 2; }
    model=$(realpath "$model")
fi
cd "$(dirname "$0")/.."
. docker/engine.sh
scratch=$(mktemp -d)
server=
containers=()
child() { tr --delete ' ' < <(cat /proc/"$1"/task/*/children); }
stop() {
    if [ -n "$server" ]; then
        # buildah passes no signal on to what it runs: that is its child's child's child.
        if [ "$ENGINE" = buildah ]; then first=$(child "$(child "$(child "$server")")"); fi
        kill "${first:-$server}" 2>/dev/null || true
        wait "$server" || true
    fi
    [ "${#containers[@]}" = 0 ] || buildah rm "${containers[@]}" >/dev/null
    rm -rf "$scratch"
}
trap stop EXIT
chmod 755 "$scratch" # another user reads it

if [ -z "$model" ]; then
    model=$scratch/emulated
    mkdir -p "$model/1"
    cat >"$model/1/emulated.yaml" <<END
service_time: {base_ms: 2.0, per_row_ms: 0.05}
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [2]}}
END
fi
serve=(--model_name=model --model_base_path=/models/model --host=127.0.0.1)
[ $# -gt 0 ] || set -- --concurrency=1:16:x4 --set=load.duration=2s

healthy=(python /usr/local/share/batchtune/healthy.py)
if [ "$ENGINE" = buildah ]; then
    for port in 8500 8501; do
        # This machine's loopback: whoever listens there already would be measured instead.
        ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "error: port $port is in use" >&2; exit 7; }
    done
    entry=(batchtune-model-server --host=0.0.0.0 --port=8500 --rest_api_port=8501)
    # No two commands run in one container at once: the health check has one of its own.
    for image in batchtune-server batchtune-server batchtune; do containers+=("$(buildah from --pull-never "$image")"); done
    run=(buildah run --isolation "${BUILDAH_ISOLATION:-chroot}")
    "${run[@]}" --volume "$model:/models/model:ro" "${containers[0]}" -- "${entry[@]}" "${serve[@]}" &
    server=$!
    is_healthy() { "${run[@]}" --env MODEL_NAME=model "${containers[1]}" -- "${healthy[@]}"; }
    tuner() { "${run[@]}" "${containers[2]}" -- batchtune "$@"; }
else
    id=$scratch/id
    "$ENGINE" run --rm --cidfile "$id" --env MODEL_NAME=model --volume "$model:/models/model:ro" batchtune-server "${serve[@]}" &
    server=$!
    is_healthy() { "$ENGINE" exec "$(cat "$id")" "${healthy[@]}"; }
    tuner() { "$ENGINE" run --rm --network "container:$(cat "$id")" batchtune "$@"; }
fi
ends=$((SECONDS + 120))
until is_healthy >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$ends" ] || { echo "error: the server is not healthy after 120 s" >&2; exit 7; }
    kill -0 "$server" 2>/dev/null || { echo "error: the server has ended" >&2; exit 7; }
    sleep 1
done
tuner load 127.0.0.1:8500/model "$@"
