"""The pydantic model of a scenario file; `reader` reads one.

YAML keys are short and their values carry units (`p95: 20ms`); the attributes carry the unit in their names
(`slo.p95_s == 0.02`). Both names are accepted from Python, only the YAML keys from files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    LENGTH_BUCKETS,
    PARAMETER_NAMES,
    TARGETS_FLAGS,
    BatchingParameters,
    Configuration,
    Dialect,
    did_you_mean,
)
from batchtune.errors import BatchingParametersError, ScenarioError
from batchtune.scenario.places import half_holes, holes
from batchtune.scenario.spec.check import CheckSpec, SloSpec
from batchtune.scenario.spec.http_server import SettingSpec
from batchtune.scenario.spec.knobs import (
    configuration_of,
    http_configuration,
    in_house_words,
    in_words_of,
    misspelt_knob,
    misspelt_triton_knob,
    server_flags,
    server_flags_of,
    triton_configuration,
)
from batchtune.scenario.spec.search_section import KnobField, KnobValue, ListSpace, RangeSpace, SearchSpec
from batchtune.scenario.spec.section import Spec, problem
from batchtune.scenario.spec.served_models import SHARED, check_loads, check_spaces
from batchtune.scenario.spec.target import TargetSpec, check_off, target_written
from batchtune.scenario.spec.workload import FileInputs, LoadSpec, OpenAiSpec, RequestSpec, transport_of

Objective = Literal["capacity", "throughput", "latency"]


class Scenario(Spec):
    """One question to batchtune: which model, under which traffic, within which SLO, over which parameters."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, dots, - and _; names the results directory",
        examples=["quickstart"],
    )
    target: TargetSpec
    request: RequestSpec = Field(default_factory=RequestSpec)
    load: LoadSpec
    slo: SloSpec = Field(default_factory=SloSpec)
    objective: Objective = Field(
        description="capacity: highest rate within the SLO; throughput: most requests per second of a closed loop; "
        "latency: lowest p95 at the given rate"
    )
    search: SearchSpec = Field(default_factory=SearchSpec)
    fixed: dict[str, KnobField | None] = Field(
        default_factory=dict,
        description="parameters and server flags that are the same in every trial",
        examples=[{"max_enqueued_batches": 100}],
    )
    variants: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="named changes to this scenario, for `batchtune compare` and `check`",
        examples=[{"without": {"fixed": {"enable_batching": False}}}],
    )
    check: CheckSpec = Field(default_factory=CheckSpec, description="gates of `batchtune check`")

    @property
    def axes(self) -> Mapping[str, ListSpace | RangeSpace]:
        """The parameters that are searched: name -> values.

        With several models `MODEL:NAME` is parameter NAME of one model. Its values are those of the model's `space`,
        else those of search.space unless the model's `batching` sets NAME.
        """
        if not self.target.models:
            return self.search.space
        own_names = [name for name in self.search.space if name in PARAMETER_NAMES and name not in SHARED]
        axes = {name: knob for name, knob in self.search.space.items() if name not in own_names}
        for own in self.target.models:
            common = {name: self.search.space[name] for name in own_names if name not in own.batching}
            axes |= {f"{own.name}:{name}": knob for name, knob in {**common, **own.space}.items()}
        return axes

    @property
    def limits(self) -> Mapping[str, float]:
        """Every limit of the SLO by name, as `SloSpec.limits`; of several models `MODEL:p95` is the limit of
        one model."""
        if not self.target.models:
            return self.slo.limits()
        return {
            f"{own.name}:{name}": limit
            for own in self.target.models
            for name, limit in (own.slo or self.slo).limits().items()
        }

    def configuration(self, point: Mapping[str, Any] | None = None) -> Configuration:
        """Make the configuration of the values of `point` (a parameter of `axes` -> value), else of `fixed`; names
        that are no batching parameter are server flags.

        What both leave out is as in `target.defaults` for kind http, and as the model has it for kind triton. With
        several models each has parameters of its own besides those that all share; `point` None: `fixed` alone.

        Raises:
            BatchingParametersError: values that no server would accept.
        """
        if self.target.models and point is not None:
            return self._of_models(point)
        if self.target.kind == "triton":
            return triton_configuration(self.fixed, point or {}, original=self.target.found)
        if self.target.kind == "http":
            defaults = self.target.in_house_words(self.target.defaults)
            return http_configuration(defaults, self.fixed, point or {}, words=self.target.words)
        return configuration_of(self.fixed, point or {}, searched=self.search.space)

    def _of_models(self, point: Mapping[str, Any]) -> Configuration:
        shared = {name: value for name, value in point.items() if ":" not in name}
        batched: dict[str, Configuration] = {}
        for own in self.target.models:
            head = f"{own.name}:"
            values = {name[len(head) :]: value for name, value in point.items() if name.startswith(head)}
            searched = {*self.search.space, *own.space}
            fixed = {**self.fixed, **own.batching}
            batched[own.name] = configuration_of(fixed, {**shared, **values}, searched=searched)
        first = next(iter(batched.values()))
        if first.batching is None:
            return first
        threads = BatchingParameters(
            num_batch_threads=first.batching.num_batch_threads,
            thread_pool_name=first.batching.thread_pool_name,
        )
        owned = tuple(
            (name, replace(own.batching, num_batch_threads=None, thread_pool_name=None))
            for name, own in batched.items()
            if own.batching is not None
        )
        return replace(first, batching=threads, models=owned)

    def with_models(self, shared: Configuration) -> Configuration:
        """Return the configuration `shared` with the own parameters of each model that has any
        (`target.models.batching`)."""
        owners = [(m.name, m.configuration(shared).batching) for m in self.target.models if m.batching]
        return replace(shared, models=tuple((name, own) for name, own in owners if own is not None))

    @property
    def streams(self) -> bool:
        """Whether requests are of protocol openai, whose servers batch continuously, so that no batch has a time."""
        return self.request.protocol == "openai"

    @property
    def streams_tokens(self) -> bool:
        """Whether answers arrive token by token, so that they have first tokens and gaps."""
        return not self.request.foreign_limits(("ttft_p95",))

    @property
    def sizes_batches(self) -> bool:
        """Whether the rows of the largest batch are known: not where the server batches continuously, nor for kind
        http without `target.means.rows`."""
        return not self.streams and (self.target.kind != "http" or self.target.means.rows is not None)

    @property
    def dialect(self) -> Dialect:
        """The kind of server by whose parameter names and defaults configurations of this scenario are
        written."""
        return self.target.kind if self.target.kind in ("triton", "http") else "tfserving"

    @property
    def fixed_flags(self) -> tuple[tuple[str, str], ...]:
        """(Name without dashes, value) of the server flags in `fixed`, of kind http also in `target.defaults`, sorted;
        every configuration has them, the references too."""
        if self.target.kind == "triton":
            return tuple(sorted(server_flags_of(self.fixed).items()))
        if self.target.kind == "http":
            return self.configuration().flags
        return server_flags(self.fixed)

    def of_models(self) -> dict[str, Scenario]:
        """Return model name -> scenario for each of `target.models`: with the model's own requests, rate or clients
        and SLO, another seed, and all else of this scenario. The objective is latency in an open loop, throughput in a
        closed one."""
        scenarios = {}
        for at, own in enumerate(self.target.models):
            load = self.load.model_copy(
                update={
                    "seed": self.load.seed + at,
                    "rate_rps": self.load.rate_rps if own.rate_rps is None else own.rate_rps,
                    "concurrency": own.concurrency or self.load.concurrency,
                }
            )
            parts = {
                "target": self.target.model_copy(update={"model": own.model, "models": ()}),
                "request": own.request or self.request,
                "slo": own.slo or self.slo,
                "load": load,
                "objective": "latency" if load.open_loop else "throughput",
            }
            scenarios[own.name] = self.model_copy(update=parts)
        return scenarios

    def with_target(self, **changes: Any) -> Scenario:
        """Return the scenario with these fields of its target replaced, unchecked."""
        return self.model_copy(update={"target": self.target.model_copy(update=changes)})

    def with_load(self, **changes: Any) -> Scenario:
        """Return the scenario with these fields of its load replaced, unchecked."""
        return self.model_copy(update={"load": self.load.model_copy(update=changes)})

    def require_rows_fit(self) -> None:
        """Check that the largest request fits in the largest batch that may be tried; a server refuses larger ones.
        Passes where a server without batching may be tried.

        Raises:
            ScenarioError: it does not fit.
        """
        rows = self.request.rows_most
        knob = self.search.space.get("max_batch_size")
        original = self.target.found
        default = DEFAULT_MAX_BATCH_SIZE if original is None else original.max_batch_size
        values = [self.fixed.get("max_batch_size") or default] if knob is None else knob.values
        largest = max((int(value) for value in values if isinstance(value, int)), default=rows)
        switch = self.search.space.get("enable_batching")
        unbatched = self.fixed.get("enable_batching") is False or (
            switch is not None and False in switch.values
        )
        if rows > largest and not unbatched:
            where = "its default" if knob is None else "in search.space"
            where = "in fixed" if "max_batch_size" in self.fixed else where
            raise ScenarioError(
                f"request.rows: a request of {rows:,} rows fits in no batch: max_batch_size is at most {largest:,} "
                f"({where})",
                hint="raise max_batch_size, or send fewer rows in a request",
            )

    def document(self) -> dict[str, Any]:
        """Return this scenario as the mapping of its YAML, with defaults written out and file names absolute.

        Left out are values that would count as the user's if they were written, such as durations and a budget that
        follow from the server's speed.
        """
        document: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for name, key in (("duration_s", "duration"), ("warm_up_s", "warm_up")):
            if name not in self.load.model_fields_set:
                del document["load"][key]
        if not self.search.budget_is_given:
            del document["search"]["budget"]
        if not self.search.space:  # everything is fixed; written as {} it would be refused
            del document["search"]["space"]
        if not self.check.model_fields_set:
            del document["check"]
        del document["target"]["model" if self.target.models else "models"]
        asked: list[tuple[RequestSpec | None, SloSpec | None, dict[str, Any]]] = [
            (self.request, self.slo, document),
            *(
                (own.request, own.slo, written)
                for own, written in zip(self.target.models, document["target"].get("models", []), strict=True)
            ),
        ]
        for request, slo, written in asked:
            if slo is not None and not slo.promises:  # a default that is spelt out would be a promise
                del written["slo"]["errors"]
            if request is not None and "timeout_s" not in request.model_fields_set:
                del written["request"]["timeout"]
        return document

    @model_validator(mode="before")
    @classmethod
    def _in_house_words(cls, given: Any) -> Any:
        """Rename the parameters of a scenario for Triton, or of kind http, from the server's own names to
        TensorFlow Serving's."""
        kind, words = target_written(given)
        if kind not in ("triton", "http") or not isinstance(given, Mapping):
            return given
        ours = in_house_words if kind == "triton" else partial(in_words_of, words=words)
        renamed = dict(given)
        try:
            renamed |= {"fixed": ours(given["fixed"])} if "fixed" in given else {}
            search = given.get("search")
            if isinstance(search, Mapping) and "space" in search:
                renamed["search"] = {**search, "space": ours(search["space"])}
        except ValueError as error:
            raise problem(str(error), hint="keep one of the two") from error
        return renamed

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        self._speak_its_protocol()
        self._leave_what_is_fixed()
        self._require_settable(info.context or {})
        self._check_objective()
        self._check_limits()
        self._check_names()
        check_loads(self.target.models, self.load)
        check_spaces(self.target.models)
        for at in range(len(self.target.models)):
            self._check_own_batching(at)
        self._check_values()
        check_off(self.target, self.fixed, self.search.space)
        self.load.check_spread(len(self.target.endpoints))
        launches = not (self.target.runs_already or self.target.models)
        self.search.check_parallel(launches=launches, has_fleet=self.load.fleet is not None)
        return self

    def _speak_its_protocol(self) -> None:
        """Choose the protocol where nobody did: kind http its own, Triton KServe v2, by gRPC if that can be
        reached; raises a problem for a protocol that the server does not speak."""
        if self.target.kind == "http" and "protocol" not in self.request.model_fields_set:
            object.__setattr__(self, "request", self.request.model_copy(update={"protocol": "http"}))
        if self.request.protocol == "http":
            self._ask_by_http()
        elif self.request.protocol == "openai" and self.target.url is not None:
            asked = (self.request.openai or OpenAiSpec()).at(self.target.url)
            if asked.path is not None:
                object.__setattr__(self, "request", self.request.model_copy(update={"openai": asked}))
        is_grpc = transport_of(self.request.protocol) == "grpc"
        if self.target.kind == "http" and is_grpc and self.target.grpc_url is None:
            raise problem(
                f"missing: where {self.request.protocol} is spoken",
                at=("target", "grpc_url"),
                hint="add grpc_url: HOST:PORT and keep url, or set request.protocol: kserve_rest",
            )
        if self.target.kind != "triton" or self.request.protocol.startswith("kserve_"):
            return
        if "protocol" in self.request.model_fields_set:
            raise problem(
                f"Triton does not speak {self.request.protocol}",
                at=("request", "protocol"),
                hint="set kserve_grpc, kserve_rest or kserve_rest_binary",
            )
        by_rest = self.target.attached and self.target.grpc_url is None
        protocol = "kserve_rest_binary" if by_rest else "kserve_grpc"
        object.__setattr__(self, "request", self.request.model_copy(update={"protocol": protocol}))

    def _ask_by_http(self) -> None:
        if self.target.kind != "http":
            raise problem(
                f"a server of kind {self.target.kind} has a protocol of its own",
                at=("request", "protocol"),
                hint="set target.kind: http, with target.url",
            )
        if self.request.body is None and not isinstance(self.request.inputs, FileInputs):
            raise problem(
                "missing: what a request of this server looks like",
                at=("request", "body"),
                hint='add body: {"inputs": "{{rows}}"}, or inputs: {file: bodies.jsonl}',
            )

        known = ["row", "rows", "uuid", *self.request.shapes]
        for name in holes(self.request.body):
            if name not in known:
                raise problem(f"no input {name}", at=("request", "body"), hint=did_you_mean(name, known))
        for text, name in half_holes(self.request.body, known):
            raise problem(
                f"{text} is not a placeholder; it would be sent as it is",
                at=("request", "body"),
                hint=f"write {{{{{name}}}}}",
            )

    def _leave_what_is_fixed(self) -> None:
        """Leave out of the default space what is fixed, and what the server does not have."""
        if "space" not in self.search.model_fields_set:
            has = {name for name, _, _ in self.target.words}
            left = {
                name: space
                for name, space in self.search.space.items()
                if name not in self.fixed and (self.target.kind != "http" or name in has)
            }
            search = self.search.model_copy(update={"space": left})
            search.model_fields_set.discard("space")
            object.__setattr__(self, "search", search)

    def _require_settable(self, context: Mapping[str, Any]) -> None:
        """Check that parameters which are searched or fixed get to the server; raises a problem if not."""
        is_kept = not context.get("files_exist", True)
        is_searched = context.get("searched", False)
        is_asked = is_searched or (self.fixed and not is_kept)
        if is_searched and self.target.set is not None:
            self._require_values(self.target.set)
        if self.target.takes_parameters or not is_asked:
            return
        named = [word for _, word, _ in self.target.words] or [*self.search.space, *self.fixed]
        wants = f", such as {named[0]}" if named else ""
        raise problem(
            f"missing: how the server is given its parameters{wants}",
            at=("target", "set"),
            hint="add target.set.request for a server that runs already, or set.env, set.flag or set.file with "
            "launch; `batchtune load` measures the server as it is",
        )

    @property
    def unset_parameters(self) -> list[str]:
        """The names of parameters that `target.set` can give to a server of kind http, and that are neither searched
        nor fixed: the server uses its own values of these."""
        house = {word: name for name, word, _ in self.target.words}
        given = {*self.search.space, *self.fixed}
        names = () if self.target.set is None else sorted(self.target.set.names())
        return [name for name in names if name not in given and house.get(name) not in given]

    def _require_values(self, setting: SettingSpec) -> None:
        """Check that each parameter of a text that is sent as a whole has a value; raises a problem if not."""
        texts = {
            ("request", "body"): setting.request and setting.request.body,
            ("file", "text"): setting.file and setting.file.text,
        }
        for place, text in texts.items():
            for name in holes(text):
                if name in self.unset_parameters:
                    raise problem(
                        f"{{{{{name}}}}} has no value",
                        at=("target", "set", *place),
                        hint=f"add {name} to search.space or to fixed",
                    )

    def _check_own_batching(self, at: int) -> None:
        own = self.target.models[at]
        path = ("target", "models", at, "batching")
        for name in SHARED:
            if name in own.batching:
                raise problem("all models share it", at=(*path, name), hint="write it in fixed")
        try:
            shared = self.configuration()
        except BatchingParametersError:
            return  # it is wrong for all, which the check of all values says
        try:
            own.configuration(shared)
        except BatchingParametersError as error:
            raise problem(self._in_its_words(error.message), hint=error.hint, at=path) from error

    def _check_objective(self) -> None:
        match self.objective:
            case "throughput" if self.load.open_loop:
                raise problem(
                    f"throughput is measured in a closed loop; load.arrivals is {self.load.arrivals}",
                    at=("objective",),
                    hint="set load.arrivals to closed, or objective to capacity or latency",
                )
            case "capacity" | "latency" if not self.load.open_loop:
                raise problem(
                    f"{self.objective} is measured in an open loop; load.arrivals is closed",
                    at=("objective",),
                    hint="set load.arrivals to poisson, or objective to throughput",
                )
            case "capacity" if not all(
                (own.slo or self.slo).limits() for own in self.target.models or [self]
            ):
                raise problem(
                    "missing: objective capacity needs a latency limit",
                    at=("slo",),
                    hint="add slo: {p95: 20ms}",
                )
            case "latency" if self.load.rate_is_missing() and not self.target.models:
                raise problem(
                    f"missing: arrivals {self.load.arrivals} at objective latency needs a rate",
                    at=("load", "rate"),
                    hint="add rate: 500/s",
                )
            case _:
                pass

    def _check_limits(self) -> None:
        for at, own in enumerate(self.target.models or [None]):
            slo, request = (own and own.slo) or self.slo, (own and own.request) or self.request
            where = ("target", "models", at) if own and own.slo else ()
            for name, why in request.foreign_limits(slo.limits()):
                hint = f"leave it out (--slo-{name.replace('_', '-')}), or set request.protocol: openai"
                raise problem(why, at=(*where, "slo", name), hint=hint)

    def _check_names(self) -> None:
        for path, names in ((("search", "space"), self.search.space), (("fixed",), self.fixed)):
            for name in names:
                wrong = self._wrong_of_target(name)
                if wrong is not None:
                    raise problem(wrong[0], at=(*path, name), hint=wrong[1])
                meant = misspelt_knob(name) if self.target.kind in ("tfserving", "command") else None
                if meant is not None:
                    raise problem(
                        "unknown batching parameter",
                        at=(*path, name),
                        hint=f"did you mean {meant!r}? (write --{name} for a server flag)",
                    )
                if name == LENGTH_BUCKETS and self.target.runs != "bundled":
                    raise problem(
                        "only the bundled server groups requests by length",
                        at=(*path, name),
                        hint="leave it out; it goes with target: {kind: tfserving, server: bundled}",
                    )
        self._check_buckets()
        for name in self.search.space.keys() & self.fixed.keys():
            raise problem("both fixed and searched", at=("fixed", name), hint="remove one of the two")

    def _check_buckets(self) -> None:
        """Check that length buckets are not both searched or fixed and among the target's flags: `none` of a
        space is no flag, so that those of the target would stay in force."""
        given = [flag for flag in self.target.flags if flag.lstrip("-") == LENGTH_BUCKETS]
        where = "searched" if LENGTH_BUCKETS in self.search.space else "fixed"
        if given and (LENGTH_BUCKETS in self.search.space or LENGTH_BUCKETS in self.fixed):
            raise problem(
                f"length_buckets is {where} too, and there none means none at all",
                at=("target", "flags", given[0]),
                hint="remove one of the two",
            )

    def _wrong_of_target(self, name: str) -> tuple[str, str] | None:
        if self.target.kind == "http":
            return self._wrong_of_http(name)
        if self.target.kind in ("tfserving", "triton") and name.lstrip("-") in TARGETS_FLAGS:
            return TARGETS_FLAGS[name.lstrip("-")], "leave it out"
        attached = self.target.attached
        return misspelt_triton_knob(name, attached=attached) if self.target.kind == "triton" else None

    def _wrong_of_http(self, name: str) -> tuple[str, str] | None:
        known = set() if self.target.set is None else self.target.set.names()
        ours = {house: word for house, word, _ in self.target.words}
        if name in known or name in ours or name == "enable_batching":
            return None
        return "target.set does not give the server such a parameter", did_you_mean(name, sorted(known))

    def _check_values(self) -> None:
        axes = self.axes
        at = -1 if self.target.models else 0  # where a value of one model is wrong, no other axis is to blame
        first = {name: space.values[at] for name, space in axes.items()}
        if not first:
            self._check_point(first, varied="")
        for name, space in axes.items():
            ends = space.values if isinstance(space, ListSpace) else (space.values[0], space.values[-1])
            for value in ends:
                self._check_point({**first, name: value}, varied=name)

    def _check_point(self, point: Mapping[str, KnobValue], *, varied: str) -> None:
        try:
            self.configuration(point)
        except BatchingParametersError as error:
            text = error.message + error.hint
            model, _, knob = varied.rpartition(":")
            culprit = next((name for name in (knob, *self.fixed) if name and name in text), knob)
            path: tuple[str | int, ...] = ("search", "space") if knob and culprit == knob else ("fixed",)
            for at, own in enumerate(self.target.models):
                if own.name == model and culprit in own.space:
                    path = ("target", "models", at, "space")
            message, hint = map(self._in_its_words, (error.message, error.hint))
            if culprit:
                path = (*path, self._in_its_words(culprit))
            raise problem(message, hint=hint, at=path) from error

    def _in_its_words(self, text: str) -> str:
        """Return a text on a batching parameter in the name and unit that a server of kind http has for it."""
        text = text.replace("input_batch_size_limit must", "max_batch_size must")
        for house, word, micros in self.target.words:
            if house in text:
                in_its_unit = partial(_divided, by=micros)
                text = re.sub(r"(?<=was )-?\d+$", in_its_unit, text.replace(house, word))
        return text


def _divided(number: re.Match[str], *, by: int) -> str:
    return f"{int(number[0]) / by:g}"
