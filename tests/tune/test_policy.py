"""Every hand-set number has its unit and reason beside it, and moves when it is set."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

from batchtune.tune import policy

FOLDER = Path(policy.__file__).parent
CHAPTERS = {
    path.stem: ast.parse(path.read_text()).body for path in FOLDER.glob("*.py") if path.stem != "__init__"
}


def numbers(statements):
    return [statement for statement in statements if isinstance(statement, ast.Assign | ast.AnnAssign)]


def name_of(number):
    return ast.unparse(number.target if isinstance(number, ast.AnnAssign) else number.targets[0])


def test_every_number_says_why_it_is_so():
    bare = [
        ast.unparse(number)
        for statements in CHAPTERS.values()
        for number, reason in pairwise([*statements, ast.Pass()])
        if number in numbers(statements)
        and not (isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant))
    ]
    assert bare == []


def test_every_number_stands_in_one_chapter_and_is_read_by_its_name():
    names = [name_of(number) for statements in CHAPTERS.values() for number in numbers(statements)]
    assert len(names) > 150
    assert sorted(names) == sorted(
        {name for name in vars(policy) if name.isupper()} - {"DEFAULT_TIME_BUDGET_S"}
    )


def test_no_default_argument_is_bound_to_the_policy_before_it_can_be_moved():
    sources = FOLDER.parents[1].rglob("*.py")
    assert [
        path.name for path in sources if re.search(r": [^=\n]+ = policy\.[A-Z]\w*,?\n", path.read_text())
    ] == []


def test_every_number_is_read_by_somebody():
    readers = [path.read_text() for path in FOLDER.parents[1].rglob("*.py") if path.parent != FOLDER]
    names = {name_of(number) for statements in CHAPTERS.values() for number in numbers(statements)}
    assert names <= set(re.findall(r"policy\.([A-Z]\w*)", "\n".join(readers)))
