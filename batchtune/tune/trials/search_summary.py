"""How was a space searched, what was believed of it, and why did the search end?

The ledger holds what was measured; this holds what the search made of it: the twin, how far it could be trusted, and
how likely the choice is to be as good as any other point of the space. A sweep hands it over when it ends; it is kept
beside the ledger, and the recommendation states it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from batchtune.plain_values import fields_to_plain, from_plain

SCHEMA_VERSION = 1

Trust = Literal["leads", "shares", "off"]


@dataclass(slots=True, kw_only=True)
class SearchSummary:
    """What a sweep says of itself: the strategy writes down what it finds, the sweep adds the rest at its end.

    `twin` is the calibrated twin as plain types; `trust` says whether it led the search, shared it with the sampler
    or was switched off, `trust_reason` why in words, `twin_error` its leave-one-out errors by figure (median
    absolute log error of "p95" and "throughput", rank correlation "spearman"). `proposals` counts those of the
    search by who made them ("twin", "sampler"). `near_best` is the probability, by twin and all measurements
    together, the fresh runs too, that a configuration lies within 5 % of the best of the `judged` points, those of
    the `space_size` that were looked at: for each configuration measured, by its label; empty where nothing models
    what was not measured. `cannot_pay` is the finding that batching cannot pay here, in words. `plan`: what the
    budget was said to be enough for, before it was spent. `noise_ratio` is the standard deviation between runs of
    one configuration, relative. `repeated_trials` counts those repeated because the host or the client spoilt them.
    `nodes` says how alike the nodes are that ran trials at once; "": there was one server.
    """

    strategy: str
    stop_reason: str = ""
    space_size: int = 0
    twin: Mapping[str, Any] | None = None
    trust: Trust | None = None
    trust_reason: str = ""
    twin_error: Mapping[str, float] = field(default_factory=dict)
    near_best: Mapping[str, float] = field(default_factory=dict)
    judged: int = 0
    proposals: Mapping[str, int] = field(default_factory=dict)
    cannot_pay: str | None = None
    plan: str = ""
    noise_ratio: float | None = None
    repeated_trials: int = 0
    nodes: str = ""
    seconds_by_phase: Mapping[str, float] = field(default_factory=dict)
    trials_by_phase: Mapping[str, int] = field(default_factory=dict)

    def continuing(self, earlier: SearchSummary) -> SearchSummary:
        """Of a sweep that went on where `earlier` ended: the time of both counts, the rest is of all trials anyway.

        A sweep that ended before it looked at anything keeps what the earlier one saw.
        """
        phases = dict.fromkeys((*earlier.seconds_by_phase, *self.seconds_by_phase))
        spent = {
            phase: earlier.seconds_by_phase.get(phase, 0.0) + self.seconds_by_phase.get(phase, 0.0)
            for phase in phases
        }
        if self.trust is None and earlier.trust is not None:
            names = ("twin", "trust", "trust_reason", "twin_error", "near_best", "judged", "cannot_pay")
            kept = {name: getattr(earlier, name) for name in names}
            return replace(self, seconds_by_phase=spent, **kept)
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
        if values.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {values.get('schema_version')!r} where {SCHEMA_VERSION} is read"
            )
        try:
            return from_plain(cls, values)
        except TypeError as error:
            raise ValueError(f"not a summary of a search: {error}") from error
