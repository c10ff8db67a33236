"""The workload that a scenario asks for: what requests are made of, and when they are sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from batchtune.scenario.spec.section import (
    ClusterAddress,
    Count,
    Cpus,
    FileName,
    HttpStatus,
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


class LognormalLengths(Spec):
    """A log-normal length: half of them below the median, 5 of 6 below median × e^sigma; longer ones are cut to max."""

    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sigma: Annotated[float, Field(gt=0, le=10, description="standard deviation of the logarithm")]
    max: Count


class HistogramLengths(Spec):
    """Lengths drawn by weight."""

    lengths: Annotated[tuple[Count, ...], Field(min_length=1)]
    weights: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.lengths) != len(self.weights):
            raise problem(
                f"expected a weight for each of the {len(self.lengths)} lengths; was {len(self.weights)}",
                at=("weights",),
            )
        return self


class LengthsSpec(Spec):
    """A distribution; every request draws a length, for all dimensions that the model leaves open."""

    lognormal: LognormalLengths | None = None
    histogram: HistogramLengths | None = None
    file: FileName | None = Field(
        default=None, description="recorded lengths, a whole number a line; as often as they occur there"
    )
    constant: Count | None = Field(default=None, description="every request has this length")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        example = "lengths: {lognormal: {median: 40, sigma: 0.8, max: 256}}"
        if len(given) != 1:
            raise problem(
                f"expected one of lognormal, histogram, file and constant; was {' and '.join(given) or 'none of them'}",
                hint=f"write {example}",
            )
        return self


Dimensions = tuple[Count, ...]
Shapes = Annotated[
    dict[str, Dimensions],
    Field(
        description="dimensions after the batch dimension of each input whose model leaves them open",
        examples=[{"ids": [200]}],
    ),
]
DISTINCT_LENGTHS: Final = 256
"""Distinct payloads for a distribution of lengths: one for each 256th part of it."""

Lengths = Annotated[
    LengthsSpec,
    Field(
        description="length of each request, for the dimensions that the model leaves open: "
        "{lognormal: {median, sigma, max}}, {histogram: {lengths, weights}}, {file: NAME} or {constant: N}; with "
        "protocol openai the tokens of the prompt",
        examples=[{"lognormal": {"median": 40, "sigma": 0.8, "max": 256}}],
    ),
]
Protocol = Literal["grpc", "rest", "kserve_grpc", "kserve_rest", "kserve_rest_binary", "http", "openai"]
"""TensorFlow Serving's two, then KServe v2's (Triton): gRPC, JSON over HTTP/1.1, and JSON with binary
tensors; http: any JSON API, by `body`; openai: an OpenAI-compatible API, whose answers are streams of
tokens."""


def transport_of(protocol: Protocol) -> Literal["grpc", "rest"]:
    """Return what carries the requests of a protocol: grpc, or rest for HTTP/1.1."""
    return "grpc" if protocol in {"grpc", "kserve_grpc"} else "rest"


SignatureName = Annotated[str, Field(description="signature of the model to call")]


class RandomRange(Spec):
    """Uniform values: low ≤ value < high; strings are drawn with `length` characters."""

    low: float | None = Field(default=None, description="lowest value; default 0")
    high: float | None = Field(
        default=None, description="values stay below this; default 1, for integers 100"
    )
    whole: bool = Field(default=False, description="whole numbers also where the model takes fractions")
    length: Count = Field(default=16, description="characters of a string")
    text: bool = Field(default=False, description="of protocol http: texts instead of numbers")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise problem(f"expected more than low, which is {self.low:g}; was {self.high:g}", at=("high",))
        return self


class RandomValues(RandomRange):
    by_input: dict[str, RandomRange] = Field(
        default_factory=dict,
        description="ranges for single inputs, by name",
        examples=[{"mask": {"high": 2}}],
    )


class RandomInputs(Spec):
    random: RandomValues = Field(description="random values within these limits")


class FileInputs(Spec):
    file: FileName = Field(
        description="recorded requests: .npz (one array per input, first axis rows), .jsonl (one TF Serving REST "
        "body a line) or TFRecord (tf_serving_warmup_requests); with protocol openai prompts: .jsonl of "
        "{prompt or messages, max_tokens}, or text with a prompt a line"
    )


def _kind_of_inputs(given: object) -> str | None:
    if isinstance(given, str):
        return "word"
    if isinstance(given, RandomInputs) or (isinstance(given, Mapping) and "random" in given):
        return "random"
    return (
        "file" if isinstance(given, FileInputs) or (isinstance(given, Mapping) and "file" in given) else None
    )


InputsField = Annotated[
    Annotated[Literal["random", "zeros"], Tag("word")]
    | Annotated[RandomInputs, Tag("random")]
    | Annotated[FileInputs, Tag("file")],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="problem",
        custom_error_message="expected random, zeros, {random: {low: 0, high: 100}} or {file: NAME}",
    ),
    Field(
        description="random, zeros, {random: {low, high}} or {file: recorded requests}", examples=["random"]
    ),
]


class MixSpec(Spec):
    """One kind of request in a mix; what is left out is taken from `request`."""

    weight: Annotated[float, Field(gt=0, description="share of requests, relative to the other weights")] = (
        1.0
    )
    rows: Count | None = Field(default=None, description="rows per request")
    signature: SignatureName | None = None
    inputs: InputsField | None = None
    shapes: Shapes | None = None
    lengths: Lengths | None = None


class OkSpec(Spec):
    """Which answers of protocol http are good."""

    status: tuple[HttpStatus, ...] = Field(
        default=(200,), min_length=1, description="any of these status codes"
    )
    path: str = Field(
        default="",
        description="a place in the answer's JSON that must have a value; null is none",
        examples=["outputs.0"],
    )


class AnswersSpec(Spec):
    """What is looked at in an answer: its status always, its tensors in a sample."""

    check: Literal["status", "decode", "expected"] = Field(
        default="decode",
        description="status: the status only; decode: tensors must decode; expected: they must equal the expected, "
        "to float precision",
    )
    sample: Ratio = Field(default=0.01, description="share of answers whose tensors are looked at")
    file: FileName | None = Field(
        default=None,
        description=".npz with one array per output, rows as in the inputs file; absent: what the server answers to "
        "each request alone",
    )


class OpenAiSpec(Spec):
    """What is asked of an OpenAI-compatible server; prompts have `request.lengths` tokens, or come from a file."""

    api: Literal["chat", "completions", "embeddings"] = Field(
        default="chat", description="chat and completions are streamed"
    )
    model: str | None = Field(
        default=None,
        description="name in each request; absent: target.model, else the one model that /v1/models lists",
    )
    output: LengthsSpec = Field(
        default=LengthsSpec(constant=64),
        description="tokens of each answer (max_tokens), as request.lengths",
        examples=[{"constant": 64}],
    )
    ignore_eos: bool = Field(
        default=True,
        description="ask for answers of exactly that many tokens (vLLM, SGLang); false for others",
    )
    prefix: Literal["unique", "shared"] = Field(
        default="unique",
        description="unique: 16 digits that differ in each request stand before the prompt, in a chat before the "
        "user's first message, so that a prefix cache helps with no more than a system prompt; shared: prompts "
        "are sent as they are, and those of a rotation recur",
    )
    tokenizer: FileName | None = Field(
        default=None,
        description="a tokenizer.json, read by the package tokenizers; absent: a short word counts as a token",
    )
    body: dict[str, Any] = Field(
        default_factory=dict, description="further keys of each request", examples=[{"temperature": 0}]
    )
    path: str | None = Field(
        default=None,
        pattern="^/",
        description="absent: that of target.url where it ends in /chat/completions, /completions or /embeddings, else "
        "/v1/chat/completions and the like",
    )

    def at(self, url: str) -> OpenAiSpec:
        """Return the section with the path of `url` where that ends in the path of an API, and with that API unless
        the section sets `api`; unchanged for another URL, or where the section has a path."""
        of_api = re.match(r"\w+://[^/]*(/.*?)?/(chat/completions|completions|embeddings)(\?.*)?$", url)
        if of_api is None or self.path is not None:
            return self
        before, ending, query = of_api.groups(default="")
        api = self.api if "api" in self.model_fields_set else ending.partition("/")[0]
        path = f"{before}/{'chat/completions' if api == 'chat' else api}{query}"
        return self.model_copy(update={"api": api, "path": path})


class RequestSpec(Spec):
    """What one request is made of, and how it travels."""

    protocol: Protocol = Field(
        default="grpc",
        description="TensorFlow Serving's grpc (PredictionService) or rest (HTTP/1.1); KServe v2's, which Triton "
        "speaks: kserve_grpc, kserve_rest (JSON), kserve_rest_binary (JSON with binary tensors); http: `body`, the "
        "default of target.kind http; openai: prompts, answered by streams of tokens",
    )
    openai: OpenAiSpec | None = Field(default=None, description="of protocol openai: prompts and answers")
    rows: Count = Field(default=1, description="rows (examples) per request")
    inputs: InputsField = "random"
    shapes: Shapes = Field(default_factory=dict)
    lengths: Lengths | None = None
    signature: SignatureName = "serving_default"
    mix: tuple[MixSpec, ...] = Field(
        default=(),
        description="several kinds of request, drawn by weight",
        examples=[[{"weight": 9, "rows": 1}]],
    )
    distinct: Count = Field(
        default=16,
        description="different payloads in rotation, so that no cache answers instead of the model; with lengths 256",
    )
    rest_format: Literal["row", "columnar"] = Field(
        default="row", description="rest: row sends `instances`, columnar sends `inputs`"
    )
    method: Literal["POST", "PUT", "PATCH"] = Field(default="POST", description="of protocol http")
    body: Any = Field(
        default=None,
        description="of protocol http: JSON in which {{row}} is a row, {{rows}} a list of `rows` of them, {{NAME}} all "
        "rows of one input of `shapes`, and {{uuid}} another text in each distinct body; a row is an array of "
        "`shapes`, by the input's name where there are several, and a number without shapes",
        examples=[{"inputs": "{{rows}}"}],
    )
    rows_path: str = Field(
        default="",
        description="of protocol http with recorded bodies: the place of the list of rows in each",
        examples=["inputs"],
    )
    ok: OkSpec = Field(default_factory=OkSpec, description="of protocol http: which answers are good")
    timeout_s: PositiveSeconds = Field(
        default=10.0, alias="timeout", description="a request without an answer within this time has failed"
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="HTTP headers or gRPC metadata",
        examples=[{"authorization": "Bearer …"}],
    )
    answers: AnswersSpec = Field(default_factory=AnswersSpec)

    @model_validator(mode="after")
    def _usable(self) -> Self:
        for name in self.headers:
            if not name or not name.isascii() or any(mark in name for mark in " :\r\n\t"):
                raise problem(f"not a header name: {name!r}", at=("headers",))
            if any(mark in self.headers[name] for mark in "\r\n"):
                raise problem("a header is one line", at=("headers", name))
        if self.openai is not None and self.protocol != "openai":
            raise problem(f"read only with protocol: openai; was {self.protocol}", at=("openai",))
        if self.protocol == "openai" and self.rows != 1:
            raise problem("a request to an OpenAI-compatible server is one row", at=("rows",))
        if self.protocol == "openai" and self.shapes:
            hint = "request.lengths sets the tokens of a prompt"
            raise problem(
                "not read with protocol: openai, whose inputs are prompts", at=("shapes",), hint=hint
            )
        if self.answers.file is not None and self.answers.check != "expected":
            raise problem("read only with check: expected", at=("answers", "file"))
        if any(kind.lengths is not None for kind in self.kinds()):
            self._drawn_lengths()
        return self

    def _drawn_lengths(self) -> None:
        for at, kind in enumerate(self.kinds()):
            if kind.lengths is not None and isinstance(kind.inputs, FileInputs):
                own = bool(self.mix) and self.mix[at].lengths is not None
                path: tuple[str | int, ...] = ("mix", at, "lengths") if own else ("lengths",)
                raise problem("recorded requests have their own lengths", at=path, hint="set inputs: random")
        if "distinct" not in self.model_fields_set:
            object.__setattr__(self, "distinct", DISTINCT_LENGTHS)

    @property
    def signatures(self) -> tuple[str, ...]:
        """The names of all signatures that are called, each once."""
        return tuple(dict.fromkeys(str(kind.signature) for kind in self.kinds()))

    @property
    def rows_most(self) -> int:
        """Rows of a request of the largest kind in the mix."""
        return max((part.rows or self.rows or 1 for part in self.mix), default=self.rows or 1)

    def foreign_limits(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """List those limits of an SLO (`ttft_p95`, `goodput`) that the answers to these requests cannot have, each with
        the reason."""
        is_openai = self.protocol == "openai"
        if is_openai and (self.openai is None or self.openai.api != "embeddings"):
            return []
        whole = "embeddings" if is_openai else self.protocol
        why = f"only of streamed answers, and those of {whole} come whole"
        streamed = ("ttft_", "itl_", *(() if is_openai else ("goodput",)))
        return [(name, why) for name in names if name.startswith(streamed)]

    def kinds(self) -> tuple[MixSpec, ...]:
        """List the kinds of request in the mix, each with everything filled in that it takes from the
        request; a request without a mix is a mix of one.

        A kind whose own inputs are a file takes no lengths from the request: recorded inputs have their own.
        """
        return tuple(
            MixSpec(
                weight=part.weight,
                rows=part.rows or self.rows,
                signature=part.signature or self.signature,
                inputs=part.inputs if part.inputs is not None else self.inputs,
                shapes=part.shapes if part.shapes is not None else self.shapes,
                lengths=self.lengths
                if part.lengths is None and not isinstance(part.inputs, FileInputs)
                else part.lengths,
            )
            for part in self.mix or (MixSpec(),)
        )


# When requests are sent.


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
        """Check that every one of `endpoints` replicas can get requests, by the number of clients and within
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
        """Whether the arrivals need a rate and the load has none."""
        return self.arrivals in {"constant", "poisson", "gamma", "on_off"} and self.rate_rps is None
