"""The package's own code as trees, for tests of its style and its words: parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import batchtune

PACKAGE = Path(batchtune.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def trees() -> dict[str, ast.Module]:
    """By the module's path in the package."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
