"""The batching parameters, and the combinations that TF Serving accepts.

Names, defaults, rules and texts: TF Serving's `session_bundle_config.proto` and `bundle_factory_util.cc`,
TensorFlow's `shared_batch_scheduler.h`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from batchtune.batching import triton_words
from batchtune.errors import BatchingParametersError
from batchtune.system import schedulable_cpus

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_MAX_BATCH_SIZE = 1000
DEFAULT_BATCH_TIMEOUT_MICROS = 0
DEFAULT_MAX_ENQUEUED_BATCHES = 10

LARGEST_VALUES = {
    "max_batch_size": 2**31 - 1,
    "batch_timeout_micros": 86_400_000_000,  # a day
    "max_enqueued_batches": 2**31 - 1,
    "num_batch_threads": 4096,
    "max_execution_batch_size": 2**31 - 1,
}
"""Largest value of each parameter in a file: beyond it servers overflow (counts of 32 bits, a timeout added to the
time) or run out of threads (the bundled server's most)."""


def default_num_batch_threads(cpus: Collection[int] | None = None) -> int:
    """Return TF Serving's default for `num_batch_threads`: the number of CPUs that the server may run on, whatever its
    quota.

    `cpus`: numbers of those that the server is pinned to; None: those of this process, which a server started by it
    inherits.
    """
    return len(schedulable_cpus() if cpus is None else cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingParameters:
    """TF Serving's `BatchingParameters`; None or () means absent: the server's default applies.

    `max_batch_size` is in rows. `max_enqueued_batches` counts the batches that wait, including the open one.
    `num_batch_threads` is how many batches run at once.
    """

    max_batch_size: int | None = None
    batch_timeout_micros: int | None = None
    max_enqueued_batches: int | None = None
    num_batch_threads: int | None = None
    thread_pool_name: str | None = None
    allowed_batch_sizes: tuple[int, ...] = ()
    pad_variable_length_inputs: bool = False
    enable_large_batch_splitting: bool | None = None
    max_execution_batch_size: int | None = None


PARAMETER_NAMES = tuple(field.name for field in fields(BatchingParameters))
SERVER_SWITCHES = ("enable_batching", "batching_parameters_file")
"""The flags by which a server gets its parameters; whatever starts the server writes them."""
SWITCH_FLAG, FILE_FLAG = (f"--{name}" for name in SERVER_SWITCHES)
PER_MODEL_FLAG = "enable_per_model_batching_parameters"
TARGETS_FLAGS = {
    "model_base_path": "target.model sets the model's path: a second path would override it",
    "model-repository": "target.model sets the repository: a second one would be served too",
    "model-control-mode": "a Triton takes parameters in explicit model control only",
    "monitoring_config_file": "each trial writes its own, and reads the server's figures by it",
    PER_MODEL_FLAG: "with it a server batches by files in the models' folders, not by the trial's parameters",
}
"""Flags that only batchtune may write when it starts a server -> why; a server obeys the last of two."""
PORT_FLAGS = ("port", "rest_api_port", "http-port", "grpc-port", "metrics-port")
UNKNOWN = "unknown"
Dialect = Literal["tfserving", "triton", "http"]
"""The server whose names and defaults a configuration has; http: those that a scenario of kind http declares."""
ServerWord = tuple[str, str, int]
"""(batching parameter, the server's own name for it, how many of our units one of the server's is)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of the search: a value for each batching parameter and server flag.

    `batching`: None where the server runs without batching. `flags`: (name without dashes, value), sorted by name; for
    Triton they include the fields of `dynamic_batching` that TensorFlow Serving lacks and, without batching,
    `instance_group.count`; for a server of kind http, its parameters that `words` does not name. `known`: False for a
    server that somebody else started and that does not report its parameters. `dialect`: whose names and defaults
    apply. `models`: (model, its own parameters) for a server of several models, which share the threads of `batching`.
    `words`: the own names and units of a server of kind http.
    """

    batching: BatchingParameters | None
    flags: tuple[tuple[str, str], ...] = ()
    known: bool = True
    dialect: Dialect = "tfserving"
    models: tuple[tuple[str, BatchingParameters], ...] = ()
    words: tuple[ServerWord, ...] = ()

    def label(self) -> str:
        """Return a name for tables: `max_batch_size=32 …`, `no batching`, `server defaults` or `unknown parameters`."""
        if not self.known:
            words = ["unknown parameters"]
        elif self.batching is None:
            words = ["no batching"]
        else:
            words = [
                f"{self.word(name)}={flag_text(self.in_its_unit(name, value))}"
                for name, value in to_dict(self.batching).items()
            ]
        words = words or ([] if self.dialect == "http" and self.flags else ["server defaults"])
        words += [f"{self.flag_word(name)}={value}" for name, value in self.flags]
        own = [f"{name}: {Configuration(batching=parameters).label()}" for name, parameters in self.models]
        return "; ".join([" ".join(words), *own])

    def of_model(self, name: str) -> Configuration:
        """Return the configuration of one of several models: its own parameters with the shared threads; if it has none
        of its own, the parameters of all."""
        own = dict(self.models).get(name)
        if own is None or self.batching is None:
            return replace(self, models=())
        threads, pool = self.batching.num_batch_threads, self.batching.thread_pool_name
        return replace(
            self, batching=replace(own, num_batch_threads=threads, thread_pool_name=pool), models=()
        )

    def in_force(self, name: str, *, cpus: Collection[int] | None = None) -> Any:
        """Return the value of a parameter or flag; one that is not set has the server's default. None: unknown.

        `name`: `MODEL:NAME` for a parameter of one of several models. `cpus`: numbers of the CPUs that the server may
        run on (`target.cpus`), whose count is the default of num_batch_threads; None: those of this process.
        """
        model, _, name = name.rpartition(":")
        if model:
            return self.of_model(model).in_force(name, cpus=cpus)
        value = getattr(self.batching, name, None)
        if value is None or value == ():
            flags = dict(self.flags)
            if name == "num_batch_threads" and self.instances_flag in flags:
                return int(flags[self.instances_flag])
            if name == LENGTH_BUCKETS:
                return flags.get(name, NO_BUCKETS)
            default = server_defaults(cpus, self.dialect).get(name)
            value = flags.get(name.lstrip("-"), default)
            if self.dialect == "http" and default is not None:  # a parameter that `means` leaves out
                return int(str(value)) if str(value).isdecimal() else default
        return value

    @property
    def timeout_s(self) -> float:
        """Seconds that the first request of a batch waits for others; 0 without batching, or where it is unknown."""
        return 0.0 if self.batching is None else float(self.in_force("batch_timeout_micros") or 0) / 1e6

    def threads(self, cpus: Collection[int] | None = None) -> int:
        """Return how many batches run at once; without batching, how many requests.

        `cpus`: numbers of the CPUs that the server may run on, from which the default follows; None: those of this
        process.
        """
        threads = int(self.in_force("num_batch_threads", cpus=cpus))
        # Without batching TensorFlow Serving and the bundled server run four requests at once for each CPU.
        return 4 * threads if self.batching is None and not self.instances_flag else threads

    def word(self, name: str) -> str:
        """Return the server's own name for a batching parameter; `name` where it has no other."""
        if self.dialect == "triton":
            return triton_words.WORDS.get(name, name)
        return next((word for ours, word, _ in self.words if ours == name), name)

    def in_its_unit(self, name: str, value: Any) -> Any:
        """Convert a batching parameter's value from TensorFlow Serving's unit to the server's own."""
        units = next((units for ours, _, units in self.words if ours == name), 1)
        if units == 1 or not isinstance(value, int):
            return value
        return value // units if value % units == 0 else value / units

    def server_values(self, rows_per_request: int = 1) -> dict[str, Any]:
        """Return the settings for a server of kind http, its own name -> value; no batching is written as batches of
        one request.

        `rows_per_request`: rows of such a batch.
        """
        if self.batching is None:
            ours: dict[str, Any] = {"max_batch_size": rows_per_request, "batch_timeout_micros": 0}
        else:
            ours = to_dict(self.batching)
        known = {name for name, _, _ in self.words}
        values = {self.word(name): self.in_its_unit(name, ours[name]) for name in ours if name in known}
        return values | {self.word(name): _meant(text) for name, text in self.flags}

    @property
    def instances_flag(self) -> str:
        """Name of the flag that bounds, without batching, the requests that run at once; "": there is no such flag."""
        return {"triton": triton_words.INSTANCES, "http": "num_batch_threads"}.get(self.dialect, "")

    def flag_word(self, name: str) -> str:
        """Return a flag's name as it is written: `--name`; for a setting of Triton's model configuration without
        dashes, for kind http the server's own name."""
        if self.dialect == "http":
            return self.word(name)
        is_setting = name in triton_words.SETTINGS or name == triton_words.INSTANCES
        return name if self.dialect == "triton" and is_setting else f"--{name}"

    @property
    def server_flags(self) -> dict[str, str]:
        """The flags that the server is started with, name without dashes -> value.

        Settings of Triton's model configuration are left out; {} for kind http, whose parameters go as `target.set`
        says.
        """
        if self.dialect == "http":
            return {}
        return {name: text for name, text in self.flags if self.flag_word(name) != name}

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON: `batching` is null where it is off, "unknown" where the server does not report
        it."""
        known = None if self.batching is None else to_dict(self.batching)
        fields: dict[str, Any] = {"batching": known if self.known else UNKNOWN, "flags": dict(self.flags)}
        if self.models:
            fields["models"] = {name: to_dict(parameters) for name, parameters in self.models}
        if self.words:
            fields["words"] = [list(word) for word in self.words]
        return fields if self.dialect == "tfserving" else {**fields, "dialect": self.dialect}

    def in_its_words(self) -> dict[str, Any]:
        """Return {"batching": …, "flags": …} in the form of `to_dict`, but with the names and units of a server of kind
        http: for readers of --json, who do not know ours."""
        fields = self.to_dict()
        flags = {self.word(name): text for name, text in self.flags}
        if self.batching is not None:
            values = self.server_values()
            fields["batching"] = {name: value for name, value in values.items() if name not in flags}
        return {"batching": fields["batching"], "flags": flags}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Configuration:
        """Make a configuration from the result of `to_dict`.

        Raises:
            BatchingParametersError: a name or a value that cannot be a batching parameter.
            KeyError: there is no `batching`.
            TypeError: batching, flags or models are no mapping, or the dialect is unknown.
        """
        batching = mapping["batching"]
        flags, models = mapping.get("flags") or {}, mapping.get("models") or {}
        known = batching != UNKNOWN
        dialect = mapping.get("dialect", "tfserving")
        if dialect not in get_args(Dialect):
            raise TypeError(f"dialect is {dialect!r}")
        for name, values in (("batching", batching if known else None), ("flags", flags), ("models", models)):
            if values is not None and not isinstance(values, Mapping):
                raise TypeError(f"{name} is {values!r}")
        return cls(
            batching=from_dict(batching) if known and batching is not None else None,
            known=known,
            dialect=dialect,
            flags=tuple(sorted((str(name), str(value)) for name, value in flags.items())),
            models=tuple((str(name), from_dict(own)) for name, own in models.items()),
            words=tuple(
                (str(ours), str(word), int(units)) for ours, word, units in mapping.get("words") or ()
            ),
        )


def server_defaults(cpus: Collection[int] | None, dialect: Dialect = "tfserving") -> dict[str, Any]:
    """Return parameter name -> the server's default, for max_batch_size, batch_timeout_micros, max_enqueued_batches and
    num_batch_threads. `cpus`: numbers of the CPUs that it may run on (None: those of this process).

    Servers of other dialects than tfserving have one instance, and a queue without a limit: 2^31 - 1 batches.
    """
    is_ours = dialect == "tfserving"
    return {
        "max_batch_size": DEFAULT_MAX_BATCH_SIZE,
        "batch_timeout_micros": DEFAULT_BATCH_TIMEOUT_MICROS,
        "max_enqueued_batches": DEFAULT_MAX_ENQUEUED_BATCHES
        if is_ours
        else LARGEST_VALUES["max_enqueued_batches"],
        "num_batch_threads": default_num_batch_threads(cpus) if is_ours else 1,
    }


def validate(parameters: BatchingParameters) -> None:
    """Check that TF Serving's model server would accept these parameters.

    Stricter than the server in two places, where it would silently do something else: sizes out of order
    (it takes the first entry that is large enough) and splitting without a maximum (it would execute 0 rows).

    Raises:
        BatchingParametersError: with TF Serving's own text.
    """
    limit = DEFAULT_MAX_BATCH_SIZE if parameters.max_batch_size is None else parameters.max_batch_size
    threads, waiting = parameters.num_batch_threads, parameters.max_enqueued_batches
    splitting = bool(parameters.enable_large_batch_splitting)
    timeout_micros = parameters.batch_timeout_micros
    if threads is not None and threads < 1:
        raise BatchingParametersError(f"num_batch_threads must be positive; was {threads}")
    if limit < 1:
        raise BatchingParametersError(
            f"input_batch_size_limit must be positive; was {limit}", hint="raise max_batch_size to at least 1"
        )
    if timeout_micros is not None and timeout_micros < 0:
        raise BatchingParametersError(f"batch_timeout_micros must be non-negative; was {timeout_micros}")
    if waiting is not None and (waiting < 0 or (waiting == 0 and splitting)):
        raise BatchingParametersError(f"max_enqueued_batches must be positive; was {waiting}")
    _validate_allowed_sizes(parameters.allowed_batch_sizes, limit)
    if splitting:
        _validate_splitting(parameters, limit)


def require_sensible(parameters: BatchingParameters) -> None:
    """Check parameters that somebody wrote into a file: the rules of `validate`, and no number beyond `LARGEST_VALUES`.

    Raises:
        BatchingParametersError: no server accepts them, or a number is beyond `LARGEST_VALUES`.
    """
    for name, most in LARGEST_VALUES.items():
        value = getattr(parameters, name)
        if value is not None and value > most:
            raise BatchingParametersError(f"{name} must be at most {most}; was {value}")
    validate(parameters)


def to_dict(parameters: BatchingParameters) -> dict[str, Any]:
    """Return the parameters that are present, name -> value, in TF Serving's order; sizes as a list. A
    pad_variable_length_inputs of False, the default, is left out."""
    present: dict[str, Any] = {}
    for name in PARAMETER_NAMES:
        value = getattr(parameters, name)
        if value is None or value == () or (name == "pad_variable_length_inputs" and not value):
            continue
        present[name] = list(value) if isinstance(value, tuple) else value
    return present


def from_dict(mapping: Mapping[str, Any]) -> BatchingParameters:
    """Make parameters from names and plain values; None means absent. Types are checked here, rules between values by
    `validate`.

    Raises:
        BatchingParametersError: an unknown name (the hint says which was meant) or a value of another type.
    """
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in PARAMETER_NAMES:
            raise BatchingParametersError(
                f"unknown batching parameter {name!r}", hint=did_you_mean(name, PARAMETER_NAMES)
            )
        if value is not None:
            values[name] = _typed(name, value)
    return BatchingParameters(**values)


def require_ports(flags: Mapping[str, Any]) -> None:
    """Check the values of those of the flags that are ports; names with or without dashes.

    Raises:
        BatchingParametersError: a port is not 0 to 65535.
    """
    for name, value in flags.items():
        if name.lstrip("-") in PORT_FLAGS and not (str(value).isdecimal() and int(str(value)) < 2**16):
            raise BatchingParametersError(f"{name}: expected a port, 0 to 65535; was {value!r}")


def did_you_mean(word: object, known: Iterable[str], *, otherwise: str = "known are") -> str:
    """Return a hint that names the known word nearest to `word`; where no word is near, `otherwise` and all known
    words."""
    names = list(known)
    near = get_close_matches(str(word), names, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise}: {', '.join(names)}"


def _validate_allowed_sizes(sizes: tuple[int, ...], limit: int) -> None:
    if not sizes:
        return
    if sizes[0] < 1:
        raise BatchingParametersError(f"allowed_batch_sizes entries must be positive; was {sizes[0]}")
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise BatchingParametersError("allowed_batch_sizes entries must be monotonically increasing")
    if sizes[-1] != limit:
        raise BatchingParametersError(
            "Last entry in allowed_batch_sizes must match max_batch_size; "
            f"last entry was {sizes[-1]}; expected {limit}"
        )


def _validate_splitting(parameters: BatchingParameters, limit: int) -> None:
    execution = parameters.max_execution_batch_size
    if execution is None and parameters.max_batch_size is None:
        raise BatchingParametersError(
            "enable_large_batch_splitting needs max_batch_size or max_execution_batch_size; both are absent",
            hint="set max_batch_size: without it TF Serving takes 0 as the size of an executed batch",
        )
    if execution is None:
        return
    if execution < 1:
        raise BatchingParametersError(f"max_execution_batch_size must be positive; was {execution}")
    if limit < execution:
        raise BatchingParametersError(
            "When enable_large_batch_splitting is true, input_batch_size_limit must be greater than or equal "
            f"to max_execution_batch_size.1{limit}{execution}",
            hint=f"max_batch_size is {limit}, max_execution_batch_size {execution}: raise one or lower one",
        )


def _typed(name: str, value: Any) -> Any:
    if name == "thread_pool_name":
        if isinstance(value, str):
            return value
        raise _wrong_type(name, value, "a string")
    if name in {"pad_variable_length_inputs", "enable_large_batch_splitting"}:
        if isinstance(value, bool):
            return value
        raise _wrong_type(name, value, "true or false")
    if name == "allowed_batch_sizes":
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise _wrong_type(name, value, "a list of whole numbers")
        return tuple(_whole(name, item) for item in value)
    return _whole(name, value)


def _whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise _wrong_type(name, value, "a whole number") from error
    if isinstance(value, bool):
        raise _wrong_type(name, value, "a whole number")
    int64_max = 2**63 - 1
    if not -int64_max - 1 <= number <= int64_max:
        raise _wrong_type(name, value, "a whole number of 64 bits")
    return number


def _wrong_type(name: str, value: object, expected: str) -> BatchingParametersError:
    return BatchingParametersError(f"{name} must be {expected}; was {value!r}")


def _meant(text: str) -> Any:
    """Return a flag's text as the JSON value that it is (a number, true, false), else as a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def flag_text(value: object) -> str:
    """Write a value as on a command line: true, false, or items with commas between them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(flag_text, value)) if isinstance(value, list | tuple) else str(value)


# The parameters that a file has, whichever server it was written for, and which of them another server lacks.

FileDialect = Literal["tfserving", "triton", "cortex", "flags", "docker", "kubernetes"]

_QUEUE: Final = "default_queue_policy.max_queue_size"
UINT32_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingFile:
    """The content of a file of batching parameters.

    `enabled`: False where batching is off; the parameters then apply only when it is switched on. `settings`: Triton's
    own fields of `dynamic_batching`, or flags of the server, as a scenario writes them. `notes`: a sentence for each
    thing in the file that is not used.
    """

    dialect: FileDialect
    parameters: BatchingParameters
    enabled: bool = True
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()

    def knobs(self, *, on_triton: bool, rows_per_request: int = 1) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return (parameters, notes): name -> value for a scenario's `fixed`, and a sentence on each thing that the
        server does not have.

        `on_triton`: whether they are for a Triton; False: for TensorFlow Serving. A limit on waiting requests becomes a
        limit on waiting batches and vice versa, each at least 1; where the file has no limit, a note says that the
        other server's default differs.

        Raises:
            BatchingParametersError: a Triton's file without `max_batch_size`, for TensorFlow Serving.
        """
        values: dict[str, Any] = to_dict(self.parameters) | dict(self.settings)
        if not self.enabled:
            values["enable_batching"] = False
        size, notes = self.parameters.max_batch_size, list(self.notes)
        translated = self.enabled and on_triton != (self.dialect == "triton")
        in_a_batch = requests_a_batch(size, rows_per_request)
        if on_triton:
            batches = values.pop("max_enqueued_batches", None)
            if batches is not None:
                values[_QUEUE] = min(batches * in_a_batch, UINT32_MAX)
            elif translated:
                notes.append(
                    f"max_enqueued_batches is absent, in TensorFlow Serving {DEFAULT_MAX_ENQUEUED_BATCHES}; Triton's "
                    "queue has no limit"
                )
            alien = {
                *triton_words.MISSING,
                *(name for name in self.settings if name not in triton_words.SETTINGS),
            }
            lacking, server = [name for name in values if name in alien], "Triton"
        else:
            if translated and size is None:
                raise BatchingParametersError(
                    "max_batch_size is absent: Triton makes no batches then, unless the model's backend fills it in",
                    hint="write the one that Triton reports (GET /v2/models/MODEL/config) into the file",
                )
            requests = values.pop(_QUEUE, None)
            if requests:
                values["max_enqueued_batches"] = max(1, requests // in_a_batch)
            elif translated:
                notes.append(
                    f"{_QUEUE} is absent or 0, in Triton no limit; TensorFlow Serving refuses what comes when "
                    f"{DEFAULT_MAX_ENQUEUED_BATCHES} batches wait, unless max_enqueued_batches says otherwise"
                )
            lacking, server = [name for name in values if name in triton_words.SETTINGS], "TensorFlow Serving"
        for name in lacking:
            del values[name]
        return values, (*notes, *(f"{name} has no counterpart in {server}" for name in lacking))


def requests_a_batch(max_batch_size: int | None, rows_per_request: int) -> int:
    """Return how many requests fill a batch, at least 1; `max_batch_size` None: TensorFlow Serving's default."""
    return max(1, (max_batch_size or DEFAULT_MAX_BATCH_SIZE) // rows_per_request)


# Length buckets, a flag of the bundled server: a queue for each range of lengths, where TensorFlow Serving has one for
# each signature, whatever the length of its requests.
#
# The cost of a batch is its rows times its longest request, in a bucket with full batches about rows times boundary. So
# the best boundaries are those with which the requests, each padded to the boundary above it, have the fewest elements:
# `boundaries_for` finds them by an exact dynamic programme over a histogram of lengths.

LENGTH_BUCKETS: Final = "length_buckets"
NO_BUCKETS: Final = "none"
AUTO_BUCKETS: Final = "auto"

Boundaries = tuple[int, ...] | Literal["auto"]
"""Lengths in rising order, () for one queue; or "auto": the server chooses them by the lengths of its requests."""

BUCKETS_MOST: Final = 6
"""Most queues that are chosen automatically. One more saves padding, but its batches fill later: over twenty
distributions of lengths 4, 6, 8 and 12 queues lose 5.0, 4.1, 4.1 and 4.7 % to the best of twenty sets of boundaries
(tests/benchmarks/replay/bucket_search.py --auto)."""

BUCKETS_PAY_FROM: Final = 0.05
"""More queues, or other boundaries, must save this share of the elements computed: chance alone saves 1 to 3 %."""


BUCKETS_MAX: Final = 64
"""Most boundaries: every signature gets a queue for each, and a batch thread looks at the queues in turn."""


def parse_length_buckets(given: object) -> Boundaries:
    """Read boundaries from "32,64,128", a list or a single length; "none", "" and () become (), "auto" stays "auto".

    Raises:
        BatchingParametersError: any other value, boundaries that do not rise, or too many.
    """
    if isinstance(given, str) and given.strip() == AUTO_BUCKETS:
        return AUTO_BUCKETS
    if isinstance(given, str):
        given = [] if given.strip() in ("", NO_BUCKETS) else given.split(",")
    elif isinstance(given, int):
        given = [given]
    if not isinstance(given, list | tuple) or any(isinstance(length, bool | float) for length in given):
        raise _not_lengths(given)
    try:
        boundaries = tuple(int(length) for length in given)
    except (TypeError, ValueError) as error:
        raise _not_lengths(",".join(map(str, given))) from error
    _check_boundaries(boundaries)
    return boundaries


def format_length_buckets(boundaries: Boundaries) -> str:
    """Write boundaries as the flag `--length_buckets` takes them; () as "none"."""
    if boundaries == AUTO_BUCKETS:
        return AUTO_BUCKETS
    return ",".join(map(str, boundaries)) or NO_BUCKETS


def rounded_up(length: int) -> int:
    """Round a length up to the end of its histogram bin: exact to 32, then 16 bins an octave."""
    exact_to = 32
    if length <= exact_to:
        return max(length, 1)
    bins_per_octave = 16
    step = 1 << ((length - 1).bit_length() - bins_per_octave.bit_length())
    return -(-length // step) * step


def boundaries_for(rows_by_length: Mapping[int, int], most: int = BUCKETS_MOST) -> tuple[int, ...]:
    """Choose the boundaries of at most `most` length buckets so that these requests have the fewest elements, padding
    included.

    `rows_by_length`: length -> number of rows. Fewer buckets are chosen where more would save at most BUCKETS_PAY_FROM
    of the elements. The last bucket takes lengths above the last boundary, so that n buckets have n - 1 boundaries; ():
    one bucket.
    """
    import numpy as np

    lengths = np.array(sorted(rows_by_length), dtype=np.float64)
    rows = np.array([rows_by_length[int(length)] for length in lengths], dtype=np.float64)
    if not len(lengths):
        return ()
    before = np.concatenate([[0.0], np.cumsum(rows)])
    # [first, last]: the elements of a queue from one length to another; inf where there is none
    queue = (before[np.newaxis, 1:] - before[:-1, np.newaxis]) * lengths
    queue[np.tril_indices(len(lengths), -1)] = np.inf
    fewest, ends = [queue[0]], np.zeros((0, len(lengths)), dtype=np.intp)
    for _ in range(min(most, len(lengths)) - 1):
        # [end of the queues before, last]: with one queue more that begins after that end
        split = fewest[-1][:-1, np.newaxis] + queue[1:]
        ends = np.vstack([ends, np.argmin(split, axis=0)])
        fewest.append(np.min(split, axis=0))
    enough = min(elements[-1] for elements in fewest) / (1.0 - BUCKETS_PAY_FROM)
    queues = next(count for count, elements in enumerate(fewest, start=1) if elements[-1] <= enough)
    return _traced(ends[: queues - 1], lengths)


def _check_boundaries(boundaries: tuple[int, ...]) -> None:
    if any(length < 1 for length in boundaries):
        raise BatchingParametersError(f"{LENGTH_BUCKETS} entries must be positive; was {min(boundaries)}")
    length_max = 2**31 - 1
    if any(length > length_max for length in boundaries):
        raise BatchingParametersError(f"{LENGTH_BUCKETS} entries must be {length_max} at most")
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise BatchingParametersError(
            f"{LENGTH_BUCKETS} entries must be monotonically increasing; was {format_length_buckets(boundaries)}",
            hint="list each length once, the shortest first, such as 32,64,128",
        )
    if len(boundaries) > BUCKETS_MAX:
        raise BatchingParametersError(f"{LENGTH_BUCKETS}: {len(boundaries)} are more than {BUCKETS_MAX}")


def _not_lengths(given: object) -> BatchingParametersError:
    return BatchingParametersError(
        f"{LENGTH_BUCKETS} must be lengths such as 32,64,128, {AUTO_BUCKETS} or {NO_BUCKETS}; was {str(given)[:100]!r}"
    )


def _traced(ends: NDArray[Any], lengths: NDArray[Any]) -> tuple[int, ...]:
    last, boundaries = len(lengths) - 1, []
    for of_queue in ends[::-1]:
        last = int(of_queue[last])
        boundaries.append(int(lengths[last]))
    return tuple(reversed(boundaries))
