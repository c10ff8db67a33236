# To be sourced: ENGINE, the first of docker, podman and buildah that works here, unless it is set.
if [ -z "${ENGINE:-}" ]; then
    for ENGINE in docker podman buildah none; do
        [ "$ENGINE" = none ] || ! "$ENGINE" info >/dev/null 2>&1 || break
    done
fi
if [ "$ENGINE" = none ]; then
    echo "error: none of docker, podman and buildah works here; \`apt-get install buildah\` needs no daemon" >&2
    exit 2
fi
