"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import typer

from batchtune.errors import UsageError

if TYPE_CHECKING:
    from batchtune.scenario.reader import ScenarioText


def option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Make an option that takes a value. `text`: its help. `names`: the option's, else made of the parameter's name."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def flag(text: str, *names: str) -> Any:
    """Make an option that needs no metavar: without a value, or with one of a few words; `text`: its help."""
    return typer.Option(*names, help=text)


def refuse(given: Mapping[str, object], why: str, *, hint: str) -> None:
    """Raise UsageError for the first option that was given; `given`: option -> its value, `why`: what it does not go
    with, `hint`: the error's."""
    for name, value in given.items():
        if value not in (None, False, [], ()):
            raise UsageError(f"{name}: {why}", hint=hint)


ScenarioArgument = Annotated[
    Path, typer.Argument(metavar="SCENARIO.yaml", help="The scenario: target, requests, load, SLO, search.")
]


def _files_beginning(incomplete: str) -> list[str]:
    """Return the paths that begin with `incomplete`, for shell completion of an argument that need not be a
    file."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    below = [f"{path}{'/' if path.is_dir() else ''}" for path in folder.glob("*")]
    return sorted(path for path in below if path.startswith(incomplete.removeprefix("./")))


SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO.yaml|MODEL",
        autocompletion=_files_beginning,
        help="A scenario (target, requests, load, SLO, search); or a model alone: a SavedModel directory, a .onnx, "
        ".pt2 or .pt file, the name of a sample model.",
    ),
]
OneRateOption = Annotated[str | None, option("R", "Lowest latency at R requests/s, such as 500/s.", "--rate")]
OneConcurrencyOption = Annotated[
    str | None, option("N", "Most requests/s of N clients in a closed loop.", "--concurrency")
]


def _completing(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a shell completion by these words; of a list divided by commas it completes the last."""

    def beginning(incomplete: str) -> list[str]:
        head, comma, last = incomplete.rpartition(",")
        return [f"{head}{comma}{word}" for word in words() if word.startswith(last)]

    return beginning


def _keys() -> list[str]:
    from batchtune.scenario.reader import dotted_keys

    return [f"{key}=" for key in dotted_keys()]


def _parameters() -> list[str]:
    from batchtune.batching.parameters import PARAMETER_NAMES

    return [f"{name}=" for name in (*PARAMETER_NAMES, "enable_batching")]


def _figures() -> list[str]:
    from batchtune.scenario.spec.check import METRICS

    return [f"{name}=" for name in METRICS]


def _servers() -> list[str]:
    from batchtune.scenario.examples import server_names

    return server_names()


SetOption = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Override a key of the scenario, e.g. search.budget.time=30s.",
        "--set",
        autocompletion=_completing(_keys),
    ),
]
ConcurrencyOption = Annotated[
    str | None, option("N|START:END:STEP|START:END:xK", "Closed loop with N clients, or a range.")
]
RateOption = Annotated[
    str | None, option("R|START:END:STEP|START:END:xK", "Open loop at R requests/s, or a range.")
]
BatchingFileOption = Annotated[
    Path | None,
    option(
        "FILE",
        "Read parameters from a file instead of `fixed`: TensorFlow Serving's text, a config.pbtxt, YAML of "
        "Cortex or Kubernetes, a script with docker run, flags. Searched parameters stay searched; the file's "
        "values are tried too.",
        "--batching-parameters-file",
    ),
]
RootOption = Annotated[Path, option("DIR", "Directory of the results.", "--results")]
JsonOption = Annotated[bool, flag("Print one JSON document on stdout.", "--json")]
WhyOption = Annotated[
    bool, flag("Print the reasoning: all that was tried, the search, warnings, alternatives.", "--why")
]
QuietOption = Annotated[bool, flag("No progress on stderr.", "--quiet", "-q")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="A run's directory. Default: the latest sweep under --results."),
]
ServerOption = Annotated[
    str | None,
    option(
        "NAME",
        "The argument is an app, or a model, of this server: bentoml, fastapi, infinity, litserve, mlserver, "
        "ray-serve, sglang, tei, transformers-serve, vllm.",
        autocompletion=_completing(_servers),
    ),
]
Dialect = Literal["tfserving", "triton", "cortex", "flags", "docker", "k8s", "kserve", "json"]
TableFormat = Literal["table", "csv", "markdown", "parquet", "json"]
Routing = Literal["round_robin", "random", "least_loaded"]


ParameterOption = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE[,VALUE…]",
        "A batching parameter. Several values give one row each, several --set all combinations.",
        "--set",
        autocompletion=_completing(_parameters),
    ),
]


LoadSetOption = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "A batching parameter of the launched server, e.g. max_batch_size=8, whether the scenario searches it "
        "or not; or a key of the scenario, e.g. load.duration=10s.",
        "--set",
        autocompletion=_completing(lambda: [*_parameters(), *_keys()]),
    ),
]


MaxRegressOption = Annotated[
    list[str] | None,
    option(
        "FIGURE=MARGIN,…",
        "How much worse a figure may get, e.g. p95=5%,throughput=3%; replaces the scenario's margins. "
        "Figures: throughput, capacity, p50, p95, p99, errors, cpu, gpu, memory, gpu_memory, startup.",
        "--max-regress",
        "--max-regression",
        autocompletion=_completing(_figures),
    ),
]


def takes(name: str, made: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds the annotated fields of a dataclass as options to a typer command, whose
    parameter `name` gets an instance made of them."""
    hints = get_type_hints(made, include_extras=True)
    options = {
        field.name: (
            hints[field.name],
            inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(made)
        if get_origin(hints[field.name]) is Annotated
    }
    return _takes(name, options, lambda values: made(**values))


def _takes(
    name: str, options: Mapping[str, tuple[Any, Any]], made: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds options to a typer command.

    `options`: parameter -> (annotation, default). The decorated function gets `made(values)` as its parameter
    `name` in place of the options' values.
    """

    def taking(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def with_options(**given: Any) -> int:
            values = {option: given.pop(option) for option in options}
            return command(**given, **{name: made(values)})

        own = inspect.signature(command, eval_str=True)
        parameters = [parameter for parameter in own.parameters.values() if parameter.name != name]
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in options.items()
        ]
        with_options.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_options

    return taking


def _slo_option(name: str) -> Any:
    names, metavar = [f"--slo-{name.replace('_', '-')}"], "DURATION"
    match name.partition("_")[0]:
        case "ttft":
            text = "Limit of the time to the first token of streamed answers; the scenario's others stay."
        case "itl":
            text = "Limit of the gaps between tokens of streamed answers; the scenario's others stay."
        case "goodput":
            metavar = "RATIO"
            text = (
                "Share of streamed answers that must meet every limit, such as 95%; replaces the scenario's."
            )
        case "errors":
            metavar, text = "RATIO", "Share of requests that may fail, such as 0.1%; replaces the scenario's."
        case _:
            names.append(f"--slo-e2e-{name}")
            text = "Limit of whole answers such as 20ms; those given replace the scenario's p50 to p99.9."
    return Annotated[str | None, option(metavar, text, *names)], None


_SLO: Final[Mapping[str, tuple[Any, None]]] = {
    f"slo_{name.replace('.', '_')}": _slo_option(name)
    for name in (
        *("p50", "p90", "p95", "p99", "p99.9"),
        *("ttft_p95", "ttft_p99", "itl_p95", "itl_p99", "goodput", "errors"),
    )
}
"""Parameter -> (annotation, default) of --slo-p50 to --slo-errors."""


def _slo_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text of the --slo-… options that were given, such as `p95`."""
    return {
        name.removeprefix("slo_").replace("p99_9", "p99.9"): values[name]
        for name in _SLO
        if values[name] is not None
    }


takes_slo = _takes("slo", _SLO, _slo_of)
"""Decorator that adds --slo-p50 to --slo-errors; the command's parameter `slo` gets name -> text of those
given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the command line says of a load and of a server, None or empty: as the scenario says; and where its results
    go.

    `scenario`: file or text, which `subject_of_sweep` and its like find for the command's argument.
    `overrides`: `KEY=VALUE`, from --set and the other options. `rate`, `concurrency`: texts of the options.
    `rest_url`, `grpc_url`: of a server that runs. `results`: folder of all runs, None: nothing is saved. What
    `asked_load` reads of them: `settings`, the batching parameters and flags from --set for a launched server;
    `file_knobs`, the parameters of the file; `notes`, a sentence on each thing that was changed unasked.
    """

    scenario: Path | ScenarioText = Path()
    overrides: Sequence[str] = ()
    concurrency: str | None = None
    rate: str | None = None
    batching_parameters_file: Path | None = None
    no_batching: bool = False
    rest_url: str | None = None
    grpc_url: str | None = None
    results: Path | None = Path("results")
    json: bool = False
    quiet: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    file_knobs: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()

    @property
    def launches(self) -> bool:
        """Whether a server is launched; False where the command line has the URL of a running one."""
        return self.rest_url is None and self.grpc_url is None


def takes_load(
    rate: Any = OneRateOption, concurrency: Any = OneConcurrencyOption, *, set_: Any = SetOption
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that adds options to a typer command: --rate, --concurrency, --slo-…, --rest, --rows, --shape,
    --range and --quiet; unless `set_` is None also --set, --batching-parameters-file, --results and --json.

    The command's parameter `wanted` gets their values as a `LoadRequest`, of which `scenario` is not set. `rate`,
    `concurrency`, `set_`: annotations of these options, which say what the command's help says.
    """
    shape, value_range = (
        option(
            "NAME=128|NAME=224x224x3",
            "Dimensions of one row of an input, if the model leaves them open.",
            "--shape",
        ),
        option("NAME=LOW:HIGH", "Values of an input, from LOW to below HIGH.", "--range"),
    )
    options: dict[str, tuple[Any, Any]] = {
        "rate": (rate, None),
        "concurrency": (concurrency, None),
        **_SLO,
        "rest": (
            Annotated[
                bool, flag("Send requests by REST. Default: the scenario's protocol, or gRPC.", "--rest")
            ],
            False,
        ),
        "rows": (
            Annotated[int | None, typer.Option(min=1, max=2**31 - 1, help="Rows in a request.")],
            None,
        ),
        "shape": (Annotated[list[str] | None, shape], None),
        "range_": (Annotated[list[str] | None, value_range], None),
    }
    if set_ is not None:
        options |= {"batching_parameters_file": (BatchingFileOption, None), "set_": (set_, None)}
        options |= {"results": (RootOption, Path("results")), "json": (JsonOption, False)}
    options["quiet"] = (QuietOption, False)
    return _takes("wanted", options, _load_request)


def _load_request(values: Mapping[str, Any]) -> LoadRequest:
    from batchtune.cli.arguments.overrides import request_overrides, slo_overrides

    request = request_overrides(
        rest=values["rest"], rows=values["rows"], shapes=values["shape"], ranges=values["range_"]
    )
    return LoadRequest(
        overrides=[*(values.get("set_") or ()), *slo_overrides(_slo_of(values)), *request],
        rate=values["rate"],
        concurrency=values["concurrency"],
        batching_parameters_file=values.get("batching_parameters_file"),
        results=values.get("results"),
        json=values.get("json", False),
        quiet=values["quiet"],
    )


def examples(*lines: str) -> str:
    """Return the text below a command's help that lists examples; its first line, a backspace, keeps typer
    from joining lines."""
    return "\n".join(["\b", "Examples:", *(f"  batchtune {line}" for line in lines)])


# Which words say how the two sides of a check differ?

Side = Literal["baseline", "candidate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideWords:
    """What the options of one side of a check say; None or empty: as in the scenario.

    `model`: its path. `ref`: git commit of the model. `image`: container image. `command`: of the server.
    `batching`: file of batching parameters. `flag`: NAME=VALUE for the server. `set`: KEY=VALUE for the
    scenario. Each is annotated with the metavar and the help of its option.
    """

    model: Annotated[str | None, "PATH", "The model of the {side}. Default: the scenario's."] = None
    ref: Annotated[str | None, "GIT_REF", "That model as it is in a git commit, e.g. {ref}."] = None
    image: Annotated[str | None, "IMAGE", "The container image that serves the {side}."] = None
    command: Annotated[str | None, "COMMAND", "The server of the {side}, as target.command, quoted."] = None
    batching: Annotated[
        str | None, "FILE", "Batching parameters of the {side}: TensorFlow Serving's file, config.pbtxt, …"
    ] = None
    flag: Annotated[list[str] | None, "NAME=VALUE", "A flag of the {side}'s server; may be repeated."] = None
    set: Annotated[
        list[str] | None, "KEY=VALUE", "A key of the scenario, for the {side} only; may be repeated."
    ] = None


def _side_option(side: str, word: str) -> Any:
    kind, metavar, text = get_args(get_type_hints(SideWords, include_extras=True)[word])
    shown = text.format(side=side, ref="main" if side == "baseline" else "HEAD")
    return Annotated[kind, option(metavar, shown, f"--{side}-{word}")]


def _side_words(side: str, given: Mapping[str, str | Sequence[str] | None]) -> SideWords:
    """Make the words of a side from its options.

    Raises:
        UsageError: an option is empty. It would mean the scenario's own value: a check of a model with
            itself, which passes.
    """
    words: dict[str, Any] = {
        word: value for word, value in given.items() if value is not None and value != []
    }
    for word, value in words.items():
        texts = [value] if isinstance(value, str) else value
        if not all(text.strip() for text in texts):
            raise UsageError(
                f"--{side}-{word}: is empty",
                hint="give it a value (is a variable of the shell unset?), or leave it out: as the scenario says",
            )
    for key, equals, value in (text.partition("=") for text in words.get("set", ())):
        if equals and not value.strip():
            from batchtune.scenario.yaml_document import empty_value

            raise empty_value(key.strip(), option=f"--{side}-set")
    for name, equals, value in (text.partition("=") for text in words.get("flag", ())):
        if equals and not value.strip():
            raise UsageError(
                f"--{side}-flag: {name.strip()} is empty", hint="give it a value, or leave it out"
            )
    return SideWords(**words)


takes_sides = _takes(
    "sides",
    {
        f"{side}_{word.name}": (_side_option(side, word.name), None)
        for side in get_args(Side)
        for word in fields(SideWords)
    },
    lambda values: {
        side: _side_words(side, {word.name: values[f"{side}_{word.name}"] for word in fields(SideWords)})
        for side in get_args(Side)
    },
)
"""Decorator that adds --baseline-model to --candidate-set; the command's parameter `sides` gets side ->
`SideWords`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What the command line of `batchtune check` asks for; None or empty: as the scenario says.

    Annotated fields are its options. `overrides`: of the scenario, `KEY=VALUE`. `baseline_set`,
    `candidate_set`: of one side; with either, the scenario's variants do not count. `note`: which commits the
    sides are of. `commit`: the candidate's, None: the working tree's.
    """

    scenario: ScenarioArgument
    candidate: Annotated[str | None, option("NAME", "The variant to check. Default: the second of two.")] = (
        None
    )
    paired: Annotated[
        bool,
        flag("Measure both sides in this job, side by side. The default without --baseline.", "--paired"),
    ] = False
    baseline: Annotated[
        Path | None, option("RUN|FILE", "Compare with stored figures instead of side by side.")
    ] = None
    update_baseline: Annotated[
        bool, flag("Measure a new baseline and write it to the file of --baseline.", "--update-baseline")
    ] = False
    force: Annotated[
        bool,
        flag(
            "With --update-baseline: write it even if it is worse than the best earlier baseline.", "--force"
        ),
    ] = False
    allow_missing: Annotated[bool, flag("Exit with 0 if there is no baseline yet.", "--allow-missing")] = (
        False
    )
    allow_mismatch: Annotated[
        bool, flag("Compare with another host's baseline by margins of 25 % and more.", "--allow-mismatch")
    ] = False
    max_regress: MaxRegressOption = None
    blocks: Annotated[
        int | None,
        typer.Option(
            min=6, max=200, help="Most runs of each side; a check stops sooner once it is clear. Default: 36."
        ),
    ] = None
    junit: Annotated[Path | None, option("FILE", "Write a JUnit report.")] = None
    markdown: Annotated[
        Path | None, option("FILE", "Append Markdown. Default: $GITHUB_STEP_SUMMARY, if set.")
    ] = None
    comment: Annotated[
        Path | None,
        option("FILE", "Write a comment for the pull request, with a marker to update it."),
    ] = None
    code_quality: Annotated[Path | None, option("FILE", "Write GitLab's code quality report.")] = None
    results: RootOption = Path("results")
    json: JsonOption = False
    quiet: QuietOption = False
    overrides: Sequence[str] = ()
    baseline_set: Sequence[str] = ()
    candidate_set: Sequence[str] = ()
    note: str = ""
    commit: str | None = None
