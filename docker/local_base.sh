#!/usr/bin/env bash
# local_base.sh [SUITE]: make a base image on this machine, by debootstrap from Debian's packages, and print its name for
# BASE. For machines that reach no registry of images; trixie has Python 3.13. As root.
set -euo pipefail
suite=${1:-trixie}
name=localhost/python-$suite
if buildah images --quiet "$name" 2>/dev/null | grep -q .; then
    echo "$name"
    exit
fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
debootstrap --variant=minbase --include=ca-certificates,python3-venv "$suite" "$root" ${mirror:+"$mirror"} >&2
# The image that it stands for has its own Python in /usr/local, into which pip may install.
chroot "$root" python3 -m venv /usr/local
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / >&2
buildah config --env PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "$container"
buildah commit --quiet --rm "$container" "$name" >&2
echo "$name"
