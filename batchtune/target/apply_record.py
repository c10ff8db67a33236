"""How did a configuration come into force?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRecord:
    """How a configuration came into force, and how many seconds that took; `startup_s` is the part from the launch of a
    server until its model was AVAILABLE, None: none was launched."""

    how: Literal["hot", "restart", "unchanged"]
    seconds: float
    startup_s: float | None = None
