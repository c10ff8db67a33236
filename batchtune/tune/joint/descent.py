"""Whom does a descent serve, and how far is it?"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from batchtune.batching.parameters import Configuration
from batchtune.tune.joint.load import Kind
from batchtune.tune.joint.space import Indices, Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Whom a descent serves: all models (`of` ""), or one alone; `share` of the budget ends it."""

    kind: Kind
    of: str
    share: float


@dataclass(slots=True, kw_only=True)
class Descent:
    """How far a descent is: the best point and its score, the moves that led there last, how far others failed."""

    goal: Goal
    axes: tuple[int, ...]
    chance: random.Random
    score: float = 0.0
    point: Indices | None = None
    last: Moves = ()
    failed: dict[Moves, float] = field(default_factory=dict)
    tried: set[Configuration] = field(default_factory=set)
