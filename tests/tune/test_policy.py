"""Every hand-set number has its unit and reason beside it, and moves when it is set."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

from batchtune.tune import policy


def test_every_number_says_why_it_is_so():
    statements = ast.parse(inspect.getsource(policy)).body
    bare = [
        ast.unparse(number)
        for number, reason in pairwise([*statements, ast.Pass()])
        if isinstance(number, ast.Assign | ast.AnnAssign)
        and not (isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant))
    ]
    assert bare == []


def test_no_default_argument_is_bound_to_the_policy_before_it_can_be_moved():
    sources = Path(policy.__file__).parents[1].rglob("*.py")
    assert [
        path.name for path in sources if re.search(r": [^=\n]+ = policy\.[A-Z]\w*,?\n", path.read_text())
    ] == []
