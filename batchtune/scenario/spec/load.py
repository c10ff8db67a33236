"""The traffic that a scenario asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from batchtune.scenario.spec.section import (
    ClusterAddress,
    Count,
    Cpus,
    FileName,
    PositiveSeconds,
    RateOrNoneRps,
    RateRps,
    Ratio,
    Seconds,
    Spec,
    Whole,
    problem,
)
from batchtune.units import counted

ArrivalKind = Literal["closed", "constant", "poisson", "gamma", "on_off", "ramp", "steps", "trace"]

Spacing = Annotated[
    Literal["poisson", "constant"],
    Field(
        description="poisson: random around the momentary rate; constant: evenly spaced at the momentary rate"
    ),
]


class GammaSpec(Spec):
    cv: Annotated[
        float,
        Field(
            gt=0,
            le=20,
            description="coefficient of variation of the time between arrivals: below 1 more even than Poisson, "
            "1 Poisson, above 1 bursty",
            examples=[3],
        ),
    ]


class OnOffSpec(Spec):
    on_s: PositiveSeconds = Field(alias="on", description="mean length of a busy phase")
    off_s: PositiveSeconds = Field(alias="off", description="mean length of a quiet phase")
    off_rate_ratio: Ratio = Field(
        default=0.0, description="rate in a quiet phase, as a ratio of that in a busy one; 0: silence"
    )
    phases: Literal["random", "fixed"] = Field(
        default="random", description="random: exponential lengths (a Markov-modulated Poisson process, MMPP)"
    )


class RampSpec(Spec):
    from_rps: RateOrNoneRps = Field(alias="from", description="rate at the start, per second")
    to_rps: RateOrNoneRps = Field(alias="to", description="rate at the end, per second")
    spacing: Spacing = "poisson"

    @model_validator(mode="after")
    def _some_traffic(self) -> Self:
        if self.from_rps == 0 and self.to_rps == 0:
            raise problem("a ramp from 0 to 0 sends nothing", at=("to",))
        return self


class StepSpec(Spec):
    rate_rps: RateOrNoneRps = Field(alias="rate", description="rate of this step, per second")
    duration_s: PositiveSeconds = Field(alias="duration", description="length of this step")


class TraceSpec(Spec):
    file: FileName = Field(
        description=".csv with a header, or .jsonl: offset_s (or offset_ms, offset_us, offset_ns) and, if wanted, "
        "request (index of the recorded request) and rows"
    )
    speed: Annotated[float, Field(gt=0, description="2: played twice as fast")] = 1.0


class FleetSpec(Spec):
    """Load workers on the nodes of a Ray cluster, in place of processes of this machine."""

    ray: ClusterAddress
    workers: Count | None = Field(
        default=None,
        description="one core sends about 100,000 requests/s; absent: one on each node that has room",
    )
    cpus_per_worker: Annotated[float, Field(gt=0, le=1024)] = Field(
        default=1.0, description="CPUs of a node that Ray sets aside for each worker, which is one thread"
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="further Ray resources that each worker needs; it runs on nodes that have them",
        examples=[{"load_generator": 1}],
    )
    placement: Literal["spread", "pack"] = Field(
        default="spread", description="spread: over as many nodes as possible; pack: on as few as possible"
    )


def _natural_duration_s(validated: dict[str, Any]) -> float:
    steps: Iterable[StepSpec] = validated.get("steps") or ()
    return sum(step.duration_s for step in steps) or 5.0


class LoadSpec(Spec):
    """Traffic: an open loop sends at its own times, whatever the server does; a closed loop waits for answers."""

    arrivals: ArrivalKind = Field(
        description="closed: N clients, each waits for its answer. Open loop: constant, poisson, gamma (bursty), "
        "on_off (bursts and silence), ramp, steps, trace (recorded times)"
    )
    rate_rps: RateRps | None = Field(default=None, alias="rate", description="open loop: requests per second")
    concurrency: Count | None = Field(
        default=None, description="closed loop: number of clients, each with one request at a time"
    )
    think_time_s: Seconds = Field(
        default=0.0,
        alias="think_time",
        description="closed loop: pause of a client between answer and request",
    )
    requests: Count | None = Field(
        default=None,
        description="closed loop: stop after this number of requests, or earlier at the end of duration, with a "
        "warning; `batchtune load` gives them 10 minutes unless a duration is written",
    )
    warm_up_s: Seconds = Field(default=1.0, alias="warm_up", description="sent first and not counted")
    seed: Whole = Field(
        default=1, description="the same seed gives the same arrivals, whatever the parameters"
    )
    gamma: GammaSpec | None = None
    on_off: OnOffSpec | None = None
    ramp: RampSpec | None = None
    steps: tuple[StepSpec, ...] | None = None
    trace: TraceSpec | None = None
    duration_s: PositiveSeconds = Field(
        default_factory=_natural_duration_s,
        alias="duration",
        description="measured part, after warm_up; default 5s, with steps as long as they take",
    )
    max_in_flight: Count | None = Field(
        default=None,
        description="open loop: most requests in flight; further requests wait, and the wait counts as latency",
    )
    connections: Count | None = Field(
        default=None, description="network connections in all; absent: what suits the protocol and the load"
    )
    processes: Count = Field(
        default=1, description="client processes; one core sends about 100,000 requests/s"
    )
    cpus: Cpus | None = Field(
        default=None,
        description="CPUs of the client processes, one each in turn. Absent: see target.cpus",
        examples=[[1]],
    )

    fleet: FleetSpec | None = Field(
        default=None, description="workers on a Ray cluster; absent: `processes` of this machine"
    )

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent at given instants, whatever the server answers."""
        return self.arrivals != "closed"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self._check_closed() if self.arrivals == "closed" else self._check_open()
        for block in ("gamma", "on_off", "ramp", "steps", "trace"):
            given = getattr(self, block) is not None
            if given and self.arrivals != block:
                raise problem(
                    f"read only with arrivals: {block}; arrivals is {self.arrivals}",
                    at=(block,),
                    hint=f"set load.arrivals to {block}, or remove the block",
                )
            if self.arrivals == block and not given:
                raise problem(f"missing: arrivals: {block} needs a {block} block", at=(block,))
        if self.fleet is not None and self.processes > 1:
            raise problem(
                "a fleet's workers are its processes",
                at=("processes",),
                hint="set load.fleet.workers, and leave processes out",
            )
        if self.steps is not None and not any(step.rate_rps for step in self.steps):
            raise problem("expected at least one step with a rate above 0", at=("steps",))
        return self

    def _check_closed(self) -> None:
        if self.concurrency is None:
            raise problem(
                "missing: arrivals: closed needs the number of clients",
                at=("concurrency",),
                hint="add concurrency: 32",
            )
        if self.rate_rps is not None:
            raise problem(
                "a closed loop has no rate: its clients send as fast as they are answered",
                at=("rate",),
                hint="use arrivals: poisson for a rate",
            )
        if self.max_in_flight is not None:
            raise problem("a closed loop is bounded by its concurrency", at=("max_in_flight",))

    def _check_open(self) -> None:
        for key, given in (
            ("concurrency", self.concurrency is not None),
            ("think_time", self.think_time_s > 0),
            ("requests", self.requests is not None),
        ):
            if given:
                raise problem(
                    f"read only with arrivals: closed; arrivals is {self.arrivals}",
                    at=(key,),
                    hint="use arrivals: closed for clients that wait for their answers",
                )

    def check_spread(self, endpoints: int) -> None:
        """Check that the load can be spread over `endpoints` replicas, so that each gets requests, within
        `max_in_flight`; raises a problem if not."""
        if self.concurrency is not None and self.concurrency < endpoints:
            raise problem(
                f"{counted(self.concurrency, 'client')} cannot ask all {endpoints} of target.endpoints: each client "
                "uses one",
                at=("load", "concurrency"),
                hint=f"set it to {endpoints} or more, or name fewer endpoints",
            )
        workers = self.processes if self.fleet is None else self.fleet.workers or 1
        senders = workers * max(1, endpoints)
        if self.max_in_flight is not None and self.max_in_flight < senders:
            raise problem(
                f"each worker sends a request to each endpoint at least, {senders} at once; "
                f"the limit is {self.max_in_flight}",
                at=("load", "max_in_flight"),
                hint=f"set it to {senders} or more, or take fewer workers or endpoints",
            )

    def rate_is_missing(self) -> bool:
        """Whether an open loop's arrivals need a rate, and it has none."""
        return self.arrivals in {"constant", "poisson", "gamma", "on_off"} and self.rate_rps is None
