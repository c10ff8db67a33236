"""What did a check say that a run keeps?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchtune.archive.run import CHECK
from batchtune.check.account import Account
from batchtune.check.finding import Finding
from batchtune.check.gate import ERROR_RATE, Gate
from batchtune.check.limit import Attribution
from batchtune.check.paired import SCHEMA_VERSION, Conclusion
from batchtune.errors import ArchiveError, TargetError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.plain_values import from_plain


def read_account(run: Path) -> Account:
    """The account in the folder of a run: the inverse of its `to_dict`.

    Raises:
        ArchiveError: there is none, it is cut short, or of another version.
    """
    path = run / CHECK
    try:
        document = json.loads(path.read_bytes())
        if document["schema_version"] != SCHEMA_VERSION:
            raise ArchiveError(
                f"{path}: schema_version {document['schema_version']!r}, and this batchtune reads {SCHEMA_VERSION}"
            )
        return account_from(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{path}: not a whole check: {error!r}") from error


def account_from(document: Mapping[str, Any]) -> Account:
    """The inverse of `Account.to_dict`; keys that the first checks lack are told from what they say.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    stored = document["error_rate"] is None
    attribution = document["attribution"]
    conclusion = Conclusion(
        verdict=document["verdict"],
        findings=tuple(_finding(gate) for gate in document["gates"]),
        blocks=int(document["blocks"]),
        fresh_blocks=int(document["fresh_blocks"]),
        blocks_max=int(document["blocks_max"]),
        reason=str(document["reason"]),
        target_failed=bool(document.get("target_failed", document["exit_code"] == TargetError.exit_code)),
        error_rate=ERROR_RATE if stored else float(document["error_rate"]),
        confirms=bool(document.get("confirms", True)),
    )
    return Account(
        scenario=str(document["scenario"]),
        baseline=str(document["baseline"]),
        candidate=str(document["candidate"]),
        conclusion=conclusion,
        attribution=None if attribution is None else from_plain(Attribution, attribution),
        seconds=float(document["seconds"]),
        run=document["run"],
        note=str(document["note"]),
        stored=stored,
    )


def _finding(document: Mapping[str, Any]) -> Finding:
    gate = Gate(
        metric=document["metric"],
        margin=float(document["margin_asked"]),
        is_default=bool(document.get("is_default", False)),
        model=str(document.get("model", "")),
    )
    change = document["change"]
    ends = sorted(
        gate.worsening_of(without if change[name] is None else float(change[name]))
        for name, without in (("low", -math.inf), ("high", math.inf))
    )
    value = _figure(change["value"])
    return Finding(
        gate=gate,
        state=document["state"],
        blocks=int(document["blocks"]),
        worsening=Estimate(
            value=math.nan if math.isnan(value) else gate.worsening_of(value), low=ends[0], high=ends[1]
        ),
        margin=_figure(document["margin"]),
        before=_figure(document["before"]),
        after=_figure(document["after"]),
        confirmed=document["confirmed"],
    )


def _figure(value: Any) -> float:
    return math.nan if value is None else float(value)
