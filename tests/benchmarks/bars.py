"""Bars that benchmarks hold their results against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar(Generic[Result]):
    """At least (or, `most`, at most) such a share of the results that `of` takes must be `good`."""

    says: str
    good: Callable[[Result], bool]
    ratio: float
    of: Callable[[Result], bool] = lambda _result: True
    most: bool = False

    def line(self, results: Sequence[Result]) -> str:
        counted = [result for result in results if self.of(result)]
        bound = f"{'<=' if self.most else '>='} {self.ratio:.0%}; {len(counted)} sweeps"
        if not counted:
            return f"-             ({bound})  {self.says}"
        reached = sum(map(self.good, counted)) / len(counted)
        passed = reached <= self.ratio if self.most else reached >= self.ratio
        return f"{'PASS' if passed else 'FAIL'}  {reached:6.1%}  ({bound})  {self.says}"
