"""What is read from a file is what its dataclass declares, at every depth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from batchtune.plain_values import from_plain, to_plain
from batchtune.tune.trials.trial import Trial
from tests.tune.tune_fakes import planted


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    ratio: float | None
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    count: int = 1
    name: str = "x"
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[str, int] = ("x", 1)
    by_rows: Mapping[int, float] | None = None
    free: dict[str, Any] | None = None


@pytest.mark.parametrize(
    "right",
    [
        Outer(),
        Outer(inner=Inner(ratio=1), many=(Inner(ratio=None), Inner(ratio=0.5, kind="b"))),
        Outer(by_rows={1: 2, 3: 4.5}, free={"anything": [None, {"at": "all"}]}),
    ],
)
def test_what_is_declared_survives_json(right: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(right), allow_nan=False))) == right


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_lacks_travels_as_a_string(value: float) -> None:
    text = json.dumps(to_plain(Outer(by_rows={1: value})), allow_nan=False)
    assert repr(from_plain(Outer, json.loads(text)).by_rows) == repr({1: value})


def test_keys_of_a_later_version_are_passed_over() -> None:
    assert from_plain(Outer, {"of_a_later_version": 1}) == Outer()


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"count": "1"}, "count is '1'"),
        ({"count": True}, "count is True"),
        ({"count": 1.5}, "count is 1.5"),
        ({"name": None}, "name is None"),
        ({"inner": [1.0]}, r"inner is \[1.0\]"),
        ({"inner": {}}, "inner.ratio is missing"),
        ({"inner": {"ratio": "x"}}, "inner.ratio is 'x'"),
        ({"inner": {"ratio": True}}, "inner.ratio is True"),
        ({"inner": {"ratio": 1.0, "kind": "c"}}, "inner.kind is 'c'"),
        ({"inner": {"ratio": 1.0, "kind": ["a"]}}, r"inner.kind is \['a'\]"),
        ({"many": {"ratio": 1.0}}, "many is "),
        ({"many": [{"ratio": 1.0}, None]}, r"many\[1\] is None"),
        ({"pair": ["x", "y"]}, r"pair\[1\] is 'y'"),
        ({"pair": ["x"]}, r"pair is \['x'\]"),
        ({"by_rows": {"1": []}}, r"by_rows.1 is \[\]"),
        ({"by_rows": {"1": None}}, "by_rows.1 is None"),
        ({"free": []}, r"free is \[\]"),
    ],
)
def test_what_is_not_is_named_by_its_place(wrong: dict[str, Any], place: str) -> None:
    with pytest.raises(TypeError, match=rf"^\.{place}"):
        from_plain(Outer, wrong)


@pytest.mark.parametrize("value", [{"value": 1.0}, [1, 2], "x", -0.5j])
def test_no_value_of_a_trial_is_taken_for_what_it_is_not(value: object) -> None:
    """Whatever stands where a number stood, the line is refused: nothing later stumbles over it."""
    whole = planted(1, throughput=1.0, p95_s=1.0, batching={"max_batch_size": 8}).to_dict()
    measurement = whole["measurement"]
    places = [(block, name) for block in (whole, measurement, measurement["server"] or {}) for name in block]
    numbers = [(block, name) for block, name in places if isinstance(block[name], int | float)]
    assert len(numbers) > 15
    for block, name in numbers:
        kept, block[name] = block[name], value
        with pytest.raises(ValueError, match=r"not a trial|could not convert|schema_version"):
            Trial.from_dict(whole)
        block[name] = kept
    assert Trial.from_dict(json.loads(json.dumps(whole))).number == 1
