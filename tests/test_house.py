"""Does the house still stand as the plan says: layers, owners of heavy packages, style, types?"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchtune"
MODULES = sorted(PACKAGE.rglob("*.py"))

# An external package, and the only places that may import it.
OWNERS = {
    "optuna": ("tune/search",),
    "jinja2": ("report/html/page.py",),
    "plotly": ("report/html/page.py",),
    "rich": ("report/", "cli/"),
    "typer": ("report/", "cli/"),
    "subprocess": ("target/", "provenance.py"),
    "pandas": ("archive/", "report/", "check.py"),
    "pyarrow": ("archive/",),
    "tensorflow": ("server/tensorflow_backend.py", "sample_models/", "wire/protos.py"),
    "keras": ("sample_models/",),
    "torch": ("server/torch_backend.py", "sample_models/"),
    "onnxruntime": ("server/onnx_backend.py", "sample_models/"),
    "hpack": ("wire/",),
    "httptools": ("wire/", "server/rest_parser.py", "server/rest_message.py"),
    "numba": ("twin/",),
    "simdjson": ("server/json_floats.py",),
}
NEVER = ("pickle", "shelve", "marshal", "dill", "cloudpickle")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_layers_are_kept() -> None:
    done = run(
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
        "--no-cache",
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    done = run(sys.executable, "-m", "ruff", "check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_would_format_nothing() -> None:
    done = run(sys.executable, "-m", "ruff", "format", "--check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_hold_under_mypy_strict() -> None:
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_by_their_owners_only(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    strangers = [
        f"{place}:{line}: {name}"
        for name, line in imports_of(path)
        if name.split(".")[0] in NEVER
        or not any(place.startswith(owner) for owner in OWNERS.get(name.split(".")[0], ("",)))
    ]
    assert not strangers


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_eval_no_shell_no_assert(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            found.append(f"{path.name}:{node.lineno}: assert")
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in {"eval", "exec"}:
                found.append(f"{path.name}:{node.lineno}: {name}")
            if any(word.arg == "shell" for word in node.keywords):
                found.append(f"{path.name}:{node.lineno}: shell=")
            if ast.unparse(node.func) in {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node.func)}")
    assert not found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_answers_a_question_in_its_first_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8").strip()
    assert not text or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_top_level_holds_what_the_plan_names() -> None:
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    folders = {"batchtune", "scenarios", "results", "tests", "docker"}
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout to look at")
    tracked = run("git", "ls-files").stdout.splitlines()
    tops = {name.split("/")[0] for name in tracked}
    assert {top for top in tops if not top.startswith(".")} <= files | folders


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from batchtune.cli import app;"
        "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0, r.output;"
        "print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout.strip().splitlines()[-1]))
    assert not loaded & {
        "tensorflow",
        "optuna",
        "jinja2",
        "pandas",
        "plotly",
        "pyarrow",
        "numpy",
        "grpc",
        "httpx",
        "pydantic",
        "torch",
    }
