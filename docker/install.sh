#!/bin/sh
# install.sh REQUIREMENT…: install them by pip, and leave out what no program here reads: byte code, tests, headers.
# MORE: further requirements, divided by spaces.
set -eu
pip install --no-compile --no-cache-dir --disable-pip-version-check --root-user-action=ignore "$@" ${MORE:-}
cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
find . -type d \( -name __pycache__ -o -name tests -o -name include \) -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.cpp' -o -name '*.h' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.pyx' \) -delete
# Of TensorFlow what builds other programs, of pyarrow what asks servers for tables, of plotly what Jupyter shows.
rm -rf clang plotly/labextension pyarrow/libarrow_flight* pyarrow/libarrow_substrait*
