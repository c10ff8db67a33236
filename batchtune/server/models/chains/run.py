"""How does one request go through the steps of a chain? On the event loop, but for the models' own queues and threads.

A step is submitted to its model as any request is, and waits in that model's queue with all others; when its outputs
are delivered the next step is submitted. The versions are those that were found when the request came, held until it
is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.server.metrics.chain_use import StepUse
from batchtune.server.models.chains.pipeline import COMPARISONS, REQUEST, Condition, Source
from batchtune.server.models.chains.plan import PlannedStep
from batchtune.server.models.loaded import LoadedVersion
from batchtune.server.sessions.request import Done, Outputs, Queued
from batchtune.wire.status import FAULT, StatusError

_Mask = NDArray[np.bool_]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What the requests of a chain have in common while its models have these versions."""

    steps: Sequence[PlannedStep]
    versions: Mapping[str, LoadedVersion]
    uses: Mapping[str, StepUse]
    held: Sequence[LoadedVersion]


class ChainRequest:
    """One request of `rows` rows under way; a Queued, whose state is that of its present step.

    `sources` are the outputs asked for, by name.
    """

    def __init__(
        self,
        route: Route,
        inputs: Mapping[str, NDArray[Any]],
        rows: int,
        sources: Mapping[str, Source],
        deadline_ns: int | None,
        done: Done,
    ) -> None:
        self._route = route
        self._tensors = {Source(REQUEST, name): array for name, array in inputs.items()}
        self._rows = rows
        self._sources = sources
        self._deadline_ns = deadline_ns
        self._done = done
        self._at = 0
        self._asked: _Mask | None = None  # None: all rows
        self._submitted_ns = 0
        self._queued: Queued | None = None
        self._ended = False
        for version in route.held:
            version.holds.take()

    @property
    def taken(self) -> bool:
        """Whether a batch thread has taken the present step out of its queue."""
        return self._queued is None or self._queued.taken

    @property
    def step(self) -> str:
        """`step NAME: `, before what is said of the present step."""
        steps = self._route.steps
        return f"step {steps[min(self._at, len(steps) - 1)].step.name}: "

    def advance(self) -> Outputs | None:
        """Submit the next step that has rows to ask; the outputs where there is none.

        Raises:
            StatusError: the step is refused, named in the text; the versions are let go.
        """
        try:
            while self._at < len(self._route.steps):
                if self._submit(self._route.steps[self._at]):
                    return None
                self._at += 1
        except StatusError as error:
            self._present_use.failed(error.code)
            named = StatusError(error.code, f"{self.step}{error.message}")
            self._end()
            raise named from None
        except BaseException:
            self._end()
            raise
        outputs = {name: self._tensors[source] for name, source in self._sources.items()}
        self._end()
        return outputs

    def _submit(self, planned: PlannedStep) -> bool:
        """Ask the model for those rows for which the step's condition holds; False: there are none."""
        step = planned.step
        self._asked = None if step.when is None else _rows_where(step.when, self._tensors, self._rows)
        asked = self._rows if self._asked is None else int(np.count_nonzero(self._asked))
        self._present_use.count_rows(asked, self._rows - asked)
        if asked == self._rows:
            self._asked = None
        elif not asked:
            self._take(planned, None)
            return False
        if self._deadline_ns is not None and self._deadline_ns <= time.monotonic_ns():
            raise StatusError("DEADLINE_EXCEEDED", "the deadline passed before it was asked")
        inputs = {name: self._rows_of(source) for name, source in step.inputs.items()}
        self._submitted_ns = time.monotonic_ns()
        self._queued = self._route.versions[step.model].submit(
            step.signature, inputs, None, self._deadline_ns, self._answered
        )
        return True

    def _rows_of(self, source: Source) -> NDArray[Any]:
        tensor = self._tensors[source]
        return tensor if self._asked is None else tensor[self._asked]

    def _answered(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Take what the present step gave, and go on; called again, with an error, where `done` fails."""
        self._queued = None
        if self._ended:
            self._done(None, error)
            return
        if outputs is None:
            fault: StatusError | None = error or StatusError("INTERNAL", "the model gave no outputs")
        else:
            fault = self._kept(outputs)
        if fault is not None:
            self._present_use.failed(fault.code)
            named = StatusError(fault.code, f"{self.step}{fault.message}")
            self._end()
            self._done(None, named)
            return
        final, failure = self._next()
        if final is not None or failure is not None:
            self._done(final, failure)

    @property
    def _present_use(self) -> StepUse:
        return self._route.uses[self._route.steps[self._at].step.name]

    def _kept(self, outputs: Outputs) -> StatusError | None:
        """Keep what the present step gave; why that cannot be, if it cannot."""
        self._present_use.times.add((time.monotonic_ns() - self._submitted_ns) / 1000)
        try:
            self._take(self._route.steps[self._at], outputs)
        except StatusError as fault:
            return StatusError(fault.code, fault.message)
        return None

    def _next(self) -> tuple[Outputs | None, StatusError | None]:
        """The outputs or the error with which the request ends; neither while a step is under way."""
        self._at += 1
        try:
            return self.advance(), None
        except StatusError as error:
            return None, StatusError(error.code, error.message)
        except Exception:
            _logger.exception("a step of a chain could not be submitted")
            return None, StatusError("INTERNAL", FAULT)

    def _take(self, planned: PlannedStep, outputs: Outputs | None) -> None:
        """Keep the step's outputs that are used, each with all rows; `outputs` None: no row was asked."""
        name = planned.step.name
        if outputs is not None and self._asked is None:
            for output, array in outputs.items():
                if output not in planned.kept:
                    continue
                if not array.ndim or len(array) != self._rows:
                    raise StatusError(
                        "FAILED_PRECONDITION", f"output {output} has not one row for each of the input"
                    )
                self._tensors[Source(name, output)] = array
            return
        for output, other in planned.otherwise.items():
            rows = self._tensors[other] if isinstance(other, Source) else other
            answered = None if outputs is None else outputs.get(output)
            self._tensors[Source(name, output)] = self._merged(output, rows, answered)

    def _merged(self, output: str, rows: NDArray[Any], answered: NDArray[Any] | None) -> NDArray[Any]:
        """The rows answered in their places, and those of `rows`, or its only one, in all others."""
        merged: NDArray[Any] = np.empty((self._rows, *rows.shape[1:]), rows.dtype)
        merged[:] = rows
        if answered is None or self._asked is None:
            return merged
        asked = int(np.count_nonzero(self._asked))
        if answered.shape != (asked, *rows.shape[1:]):
            raise StatusError(
                "FAILED_PRECONDITION",
                f"output {output} has the shape {answered.shape} for {asked} rows, and the other rows have "
                f"{rows.shape[1:]}",
            )
        merged[self._asked] = answered
        return merged

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._tensors = {}
            for version in self._route.held:
                version.holds.leave()


def _rows_where(when: Condition, tensors: Mapping[Source, NDArray[Any]], rows: int) -> _Mask:
    """For which rows the condition holds.

    Raises:
        StatusError: a row has not the element that is compared.
    """
    if not rows:
        return np.zeros(0, np.bool_)
    table = tensors[when.source].reshape(rows, -1)
    element = when.element or 0
    if element >= table.shape[1] or (when.element is None and table.shape[1] != 1):
        raise StatusError(
            "FAILED_PRECONDITION",
            f"when: a row of {when.source} has {table.shape[1]} values; expected one to compare",
        )
    mask: _Mask = COMPARISONS[when.comparison](table[:, element], when.number)
    return mask
