#!/bin/sh
# install.sh REQUIREMENT…: install them by pip, and leave out what no program here reads: tests and headers, and byte code
# unless BYTE_CODE=keep. MORE: further requirements, divided by spaces. install.sh wheel OPTION…: pip wheel. Both with the
# secrets of the build, where it has them.
set -eu
[ ! -f /run/secrets/pip ] || export PIP_CONFIG_FILE=/run/secrets/pip
[ ! -f /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
if [ "$1" = wheel ]; then exec pip "$@"; fi
compile=--no-compile
[ "${BYTE_CODE:-}" != keep ] || compile=
pip install $compile "$@" ${MORE:-}
cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
[ "${BYTE_CODE:-}" = keep ] || find . -type d -name __pycache__ -prune -exec rm -rf {} +
find . -type d \( -name tests -o -name include \) -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.cpp' -o -name '*.h' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.pyx' \) -delete
# Of TensorFlow what builds other programs, of pyarrow what asks servers for tables.
rm -rf clang pyarrow/libarrow_flight*
