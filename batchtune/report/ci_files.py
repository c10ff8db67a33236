"""A check in the formats of CI systems: JUnit, Markdown, a comment, annotations, code quality; and the job itself.

Nothing here needs a token: these are files and lines that the job's own steps hand on. Only the step that posts the
comment needs one, which a change from a fork has not and does without.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from xml.etree import ElementTree as ET

from batchtune.check.gate import margin_text
from batchtune.report import check_text, tables

if TYPE_CHECKING:
    from batchtune.check.account import Conclusion
    from batchtune.check.gate import Finding


def junit_xml(account: Conclusion) -> str:
    """Return a check as JUnit XML, a test case for each gate; a gate that is undecided or void is skipped.

    One more case represents the whole check where there is no gate, or the verdict is INVALID, INCOMPARABLE
    or SLO MISSED.
    """
    cases = [_gate_case(account, finding) for finding in account.findings]
    if not cases or account.verdict in ("INVALID", "INCOMPARABLE", "SLO MISSED"):
        cases.append(_whole_case(account))
    suite = ET.Element(
        "testsuite",
        name=_xml(f"batchtune check {account.scenario}"),
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        skipped=str(sum(case.find("skipped") is not None for case in cases)),
        time=f"{account.seconds:.3f}",
    )
    suite.extend(cases)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def markdown(account: Conclusion) -> str:
    """Return a check as Markdown, for a CI job's summary or a comment."""
    lines = [
        f"### {account.verdict}: `{account.scenario}`",
        "",
        _plain(check_text.outcome(account)),
        "",
    ]
    rows = [[_plain(cell) for cell in row] for row in check_text.gate_table(account)]
    lines += [*tables.markdown_lines(rows), ""] if rows else []
    lines += [f"- **{label}:** {_plain(text)}" for label, text in check_text.closing(account)]
    return "\n".join(lines) + "\n"


def comment(account: Conclusion) -> str:
    """Return a check as Markdown after an HTML comment, by which a CI step finds the comment on a change that it is to
    update."""
    return f"<!-- batchtune:{re.sub(r'[^A-Za-z0-9._]+', '-', account.scenario)} -->\n{markdown(account)}"


def github_annotations(account: Conclusion, *, file: str) -> list[str]:
    """Return a check as GitHub workflow commands: warnings where it is INCONCLUSIVE, else errors; empty for OK and
    IMPROVED."""
    verdict = account.verdict
    if verdict in ("OK", "IMPROVED"):
        return []
    level = "warning" if verdict == "INCONCLUSIVE" else "error"
    place = f"file={_property(file)},title={_property(f'batchtune: {verdict}')}"
    return [f"::{level} {place}::{_message(text)}" for text in _messages(account).values()]


def code_quality(account: Conclusion, *, file: str) -> str:
    """Return a check as GitLab's code quality report in JSON: an issue for each figure that makes the verdict; an
    empty list for OK and IMPROVED."""
    severity = {"INCONCLUSIVE": "minor", "OK": "info", "IMPROVED": "info"}.get(account.verdict, "major")
    texts = {} if severity == "info" else _messages(account)
    issues = [
        {
            "description": text,
            "check_name": "batchtune-check",
            "fingerprint": hashlib.sha256(f"{account.scenario} {figure}".encode()).hexdigest(),
            "severity": severity,
            "location": {"path": file, "lines": {"begin": 1}},
        }
        for figure, text in texts.items()
    ]
    return json.dumps(issues, indent=2) + "\n"


def _messages(account: Conclusion) -> dict[str, str]:
    """Return figure -> text for each figure that makes the verdict; where none does, verdict -> its text."""
    state = {"REGRESSED": "regressed", "INCONCLUSIVE": "open"}.get(account.verdict)
    flagged = (finding for finding in account.findings if finding.state == state)
    texts = {finding.gate.name: check_text.finding_text(finding) for finding in flagged}
    why = "" if account.attribution is None else f"; {check_text.attribution_text(account.attribution)}"
    return {name: f"{text}{why}" for name, text in texts.items()} or {
        account.verdict: check_text.headline(account)
    }


def _gate_case(account: Conclusion, finding: Finding) -> ET.Element:
    """Return the test case of one gate."""
    case = ET.Element(
        "testcase", name=finding.gate.name, classname=_xml(f"batchtune.{account.scenario}"), time="0"
    )
    text = _xml(
        f"{account.candidate} against {account.baseline}: {finding.gate.name} {check_text.change_text(finding)}, "
        f"margin {margin_text(finding.gate, finding.margin)}"
    )
    if account.is_void:
        ET.SubElement(case, "skipped", message=f"void: {text}")
    elif finding.state == "regressed":
        why = "" if account.attribution is None else f"\n{check_text.attribution_text(account.attribution)}"
        ET.SubElement(case, "failure", message=text, type="regression").text = _xml(f"{text}{why}")
    elif finding.state in ("open", "not measured"):
        ET.SubElement(
            case, "skipped", message=f"{check_text.STATES.get(finding.state, finding.state)}: {text}"
        )
    else:
        ET.SubElement(case, "system-out").text = text
    return case


def _whole_case(account: Conclusion) -> ET.Element:
    """Return the test case of the whole check."""
    verdict = account.verdict
    case = ET.Element("testcase", name="check", classname=_xml(f"batchtune.{account.scenario}"), time="0")
    text = _xml(check_text.headline(account))
    if verdict in ("REGRESSED", "SLO MISSED", "INVALID", "INCOMPARABLE"):
        tag = "failure" if verdict in ("REGRESSED", "SLO MISSED") else "error"
        ET.SubElement(case, tag, message=text, type=verdict.lower()).text = text
    elif verdict == "INCONCLUSIVE":
        ET.SubElement(case, "skipped", message=text)
    return case


def _plain(text: str) -> str:
    """Return the text as one line, with `<` escaped, which Markdown would take for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def _xml(text: str) -> str:
    """Return the text with `?` in place of each control character that XML cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _message(text: str) -> str:
    """Escape a text for a GitHub workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property of a GitHub workflow command."""
    return _message(text).replace(":", "%3A").replace(",", "%2C")


# The job that checks every change, a workflow for GitHub or a pipeline for GitLab: it launches the model of the target
# branch and that of the change side by side.

Host = Literal["github", "gitlab"]

JOB_FILES: Final[dict[Host, str]] = {
    "github": ".github/workflows/batchtune.yml",
    "gitlab": ".gitlab-ci.batchtune.yml",
}
"""Host of the repository -> path at which it expects the CI job."""


def job_text(
    host: Host, *, path: str, scenario: str, model: str, usual: str, minutes: int, extras: Sequence[str] = ()
) -> str:
    """Return the text of a CI job that checks every change by a scenario.

    `path`: of the scenario's file. `scenario`, `model`: that path and its model's, quoted for a shell.
    `usual`: how long a check usually takes, in words. `minutes`: after which the host ends the job. `extras`:
    of batchtune's package.
    """
    template = Path(__file__).with_name(f"{host}_job.yml").read_text(encoding="utf-8")
    package = f"batchtune[{','.join(extras)}]" if extras else "batchtune"
    install = f"pip install {shlex.quote(package)}"
    if "torch" in extras:  # PyPI's build brings gigabytes of CUDA, of no use on hosted runners
        install = f"pip install torch --index-url https://download.pytorch.org/whl/cpu && {install}"
    words = {
        "path": path,
        "scenario": scenario,
        "model": model,
        "usual": usual,
        "minutes": str(minutes),
        "package": package,
        "install": install,
    }
    # `@name` is filled in, because the shell and the CI system use `$`; `@v4` of an action stays.
    return re.sub(r"@([a-z]+)", lambda place: words.get(place[1], place[0]), template)
