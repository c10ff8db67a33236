#!/usr/bin/env bash
# build.sh [TARGET…]: build the images (cli, server, fleet, server-cuda; without a name cli and server) with docker, podman
# or buildah, as batchtune, batchtune-server, batchtune-fleet and batchtune-server-cuda. From the environment:
#   ENGINE             docker, podman or buildah, instead of the first that is there
#   BASE               an image with Python 3.11 or later and pip, instead of python:3.12.8-slim-bookworm
#   PIP_CONF, CA       files that pip reads while it installs: a pip.conf that names a mirror, a bundle of certificates
#   FRAMEWORKS         of the server, instead of "tensorflow-cpu>=2.20,<3 onnxruntime>=1.20"
#   TORCH, TORCH_INDEX PyTorch in the server: TORCH=torch==2.13.0 takes the build for CPUs; an empty TORCH_INDEX is pip's own
#   BUILD_OPTIONS      more options of the engine's build command
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/engine.sh
options=(--file docker/Dockerfile)
case $ENGINE in
    buildah) build=(buildah build --layers --isolation "${BUILDAH_ISOLATION:-chroot}" --format docker --ignorefile docker/Dockerfile.dockerignore) ;;
    podman) build=(podman build --format docker --ignorefile docker/Dockerfile.dockerignore) ;;
    *) build=("$ENGINE" build) ;;
esac
for name in BASE FRAMEWORKS TORCH TORCH_INDEX; do
    # Build arguments stay in the history of an image.
    if [[ ${!name:-} =~ ://[^/[:space:]]*@ ]]; then
        echo "error: $name names a user or a password, which would stay in the image: put them into PIP_CONF" >&2
        exit 2
    fi
    [ -z "${!name+set}" ] || options+=(--build-arg "$name=${!name}")
done
[ -z "${PIP_CONF:-}" ] || options+=(--secret "id=pip,src=$PIP_CONF")
[ -z "${CA:-}" ] || options+=(--secret "id=ca,src=$CA")
read -ra more <<<"${BUILD_OPTIONS:-}"

[ $# -gt 0 ] || set -- cli server
for target in "$@"; do
    case $target in
        cli) name=batchtune ;;
        server | fleet | server-cuda) name=batchtune-$target ;;
        *)
            echo "error: $target: there are cli, server, fleet and server-cuda" >&2
            exit 2
            ;;
    esac
    "${build[@]}" "${options[@]}" "${more[@]}" --target "$target" --tag "$name" .
done
