#!/usr/bin/env bash
# sbom.sh IMAGE > sbom.json: what an image's Python environment carries, with versions and licences, as CycloneDX: by
# cyclonedx-py, in a container of the image that is thrown away. ENGINE and CA are those of build.sh.
set -euo pipefail
image=${1:?an image, such as batchtune}
if [ -z "${ENGINE:-}" ]; then
    for ENGINE in docker podman buildah; do
        ! "$ENGINE" info >/dev/null 2>&1 || break
    done
fi
# Its own packages stay out of the list, since they lie in an environment of their own.
program='python -m venv /tmp/sbom && /tmp/sbom/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom==7.* >&2 \
    && /tmp/sbom/bin/cyclonedx-py environment --output-format JSON "$(command -v python)"'
mount=()
[ -z "${CA:-}" ] || mount=(--volume "$CA:/etc/ssl/certs/ca-certificates.crt:ro")
if [ "$ENGINE" = buildah ]; then
    container=$(buildah from --pull-never "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
    buildah run --isolation "${BUILDAH_ISOLATION:-chroot}" "${mount[@]}" "$container" -- sh -c "$program"
else
    "$ENGINE" run --rm "${mount[@]}" --entrypoint sh "$image" -c "$program"
fi
