"""requirements.py PYPROJECT [server]: print the package's dependencies, or those of its server, one a line."""

import re
import sys
import tomllib
from pathlib import Path

SERVER = {
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "hpack",
    "httptools",
    "ml-dtypes",
    "numpy",
    "orjson",
    "protobuf",
    "psutil",
    "pysimdjson",
    "python-rapidjson",
    "PyYAML",
    "uvloop",
}

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
lines = {re.split("[<>=]", line)[0]: line for line in project["dependencies"]}
print("\n".join(lines[name] for name in sorted(SERVER if "server" in sys.argv[2:] else lines)))
