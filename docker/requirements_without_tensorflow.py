"""Print the dependencies of a pyproject.toml but TensorFlow's own, one a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
print("\n".join(one for one in project["dependencies"] if not one.startswith("tensorflow")))
