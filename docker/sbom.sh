#!/usr/bin/env bash
# sbom.sh IMAGE > sbom.json: what an image's Python environment carries, with versions and licences, as CycloneDX: by
# cyclonedx-py, in a container of the image that is thrown away. ENGINE, PIP_CONF and CA are those of build.sh.
set -euo pipefail
image=${1:?an image, such as batchtune}
. "$(dirname "$0")/engine.sh"
# Its own packages stay out of the list, since they lie in an environment of their own.
program='python -m venv /tmp/sbom && /tmp/sbom/bin/pip install --quiet --disable-pip-version-check "cyclonedx-bom==7.*" >&2 \
    && /tmp/sbom/bin/cyclonedx-py environment --output-format JSON "$(command -v python)"'
mounts=()
[ -z "${PIP_CONF:-}" ] || mounts+=(--volume "$(realpath "$PIP_CONF"):/etc/pip.conf:ro")
[ -z "${CA:-}" ] || mounts+=(--volume "$(realpath "$CA"):/etc/ssl/certs/ca-certificates.crt:ro")
if [ "$ENGINE" = buildah ]; then
    container=$(buildah from --pull-never "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
    buildah run --isolation "${BUILDAH_ISOLATION:-chroot}" "${mounts[@]}" "$container" -- sh -c "$program"
else
    "$ENGINE" run --rm "${mounts[@]}" --entrypoint sh "$image" -c "$program"
fi
