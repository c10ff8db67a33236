#!/bin/sh
# install.sh REQUIREMENT…: install them by pip, and leave out what no program here reads: tests and headers, and byte code
# unless BYTE_CODE=keep. MORE: further requirements, divided by spaces.
set -eu
compile=--no-compile
[ "${BYTE_CODE:-}" != keep ] || compile=
pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore $compile "$@" ${MORE:-}
cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
[ "${BYTE_CODE:-}" = keep ] || find . -type d -name __pycache__ -prune -exec rm -rf {} +
find . -type d \( -name tests -o -name include \) -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.cpp' -o -name '*.h' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.pyx' \) -delete
# Of TensorFlow what builds other programs, of pyarrow what asks servers for tables, of plotly what Jupyter shows.
rm -rf clang plotly/labextension pyarrow/libarrow_flight*
