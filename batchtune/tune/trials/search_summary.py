"""What a sweep says of itself when it ends; kept beside the ledger, which holds what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchtune.plain_values import check_version, fields_to_plain, from_plain

SCHEMA_VERSION = 1


@dataclass(slots=True, kw_only=True)
class SearchSummary:
    """How a space was searched.

    `plan`: what the budget was divided into, before it was spent. `proposals`: runs by who named the configuration.
    `curve`: seconds of a batch by its rows, as the search read them. `nodes`: those that ran trials at once; "": there
    was one server.
    """

    strategy: str
    stop_reason: str = ""
    space_size: int = 0
    plan: str = ""
    proposals: Mapping[str, int] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    nodes: str = ""
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    trials_by_phase: Mapping[str, int] = field(default_factory=dict)

    def continuing(self, earlier: SearchSummary) -> SearchSummary:
        """Of a sweep that went on where `earlier` ended: the time of both counts, the rest is of all trials anyway."""
        phases = dict.fromkeys((*earlier.seconds_by_phase, *self.seconds_by_phase))
        spent = {
            phase: earlier.seconds_by_phase.get(phase, 0.0) + self.seconds_by_phase.get(phase, 0.0)
            for phase in phases
        }
        return replace(self, seconds_by_phase=spent)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        return {"schema_version": SCHEMA_VERSION, **fields_to_plain(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchSummary:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema version, a value of the wrong type, or no summary at all.
        """
        check_version(values, SCHEMA_VERSION)
        try:
            return from_plain(cls, values)
        except TypeError as error:
            raise ValueError(f"not a summary of a search: {error}") from error
