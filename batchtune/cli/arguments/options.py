"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from batchtune.errors import UsageError

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
RestOption = Annotated[
    bool, typer.Option("--rest", help="Send requests by REST. Default: the scenario's protocol, or gRPC.")
]
RowsOption = Annotated[int | None, typer.Option(min=1, max=2**31 - 1, help="Rows in a request.")]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=128|NAME=224x224x3",
        help="Dimensions of one row of an input, if the model leaves them open.",
    ),
]
RangeOption = Annotated[
    list[str] | None,
    typer.Option("--range", metavar="NAME=LOW:HIGH", help="Values of an input, from LOW to below HIGH."),
]
OneRateOption = Annotated[
    str | None, typer.Option("--rate", metavar="R", help="Lowest latency at R requests/s, such as 500/s.")
]
OneConcurrencyOption = Annotated[
    str | None,
    typer.Option("--concurrency", metavar="N", help="Most requests/s of N clients in a closed loop."),
]


def _keys_beginning(incomplete: str) -> list[str]:
    """Return the keys of a scenario that begin with `incomplete`, each with `=`, for shell completion of
    --set."""
    from batchtune.scenario.reader import dotted_keys

    return [f"{key}=" for key in dotted_keys() if key.startswith(incomplete)]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the scenario, e.g. search.budget.time=30s.",
        autocompletion=_keys_beginning,
    ),
]
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(metavar="N|START:END:STEP|START:END:xK", help="Closed loop with N clients, or a range."),
]
RateOption = Annotated[
    str | None,
    typer.Option(metavar="R|START:END:STEP|START:END:xK", help="Open loop at R requests/s, or a range."),
]
BatchingFileOption = Annotated[
    Path | None,
    typer.Option(
        "--batching-parameters-file",
        metavar="FILE",
        help="Read parameters from a file instead of `fixed`: TensorFlow Serving's text, a config.pbtxt, YAML of "
        "Cortex or Kubernetes, a script with docker run, flags. Searched parameters stay searched; the file's values "
        "are tried too.",
    ),
]
RootOption = Annotated[Path, typer.Option("--results", metavar="DIR", help="Directory of the results.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
WhyOption = Annotated[
    bool,
    typer.Option(
        "--why", help="Print the reasoning: all that was tried, the search, warnings, alternatives."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="A run's directory. Default: the latest sweep under --results."),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The argument is an app, or a model, of this server: bentoml, fastapi, infinity, litserve, mlserver, "
        "ray-serve, sglang, tei, transformers-serve, vllm.",
    ),
]
Dialect = Literal["tfserving", "triton", "cortex", "flags", "docker", "k8s", "kserve", "json"]
TableFormat = Literal["table", "csv", "markdown", "parquet", "json"]
Routing = Literal["round_robin", "random", "least_loaded"]


def _parameters_beginning(incomplete: str) -> list[str]:
    """Return the batching parameters that begin with `incomplete`, each with `=`, for shell completion of
    --set."""
    from batchtune.batching.parameters import PARAMETER_NAMES

    return [f"{name}=" for name in (*PARAMETER_NAMES, "enable_batching") if name.startswith(incomplete)]


ParameterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE[,VALUE…]",
        help="A batching parameter. Several values give one row each, several --set all combinations.",
        autocompletion=_parameters_beginning,
    ),
]


def _keys_and_parameters_beginning(incomplete: str) -> list[str]:
    """Return parameters and scenario keys that begin with `incomplete`, for shell completion of `load --set`."""
    return [*_parameters_beginning(incomplete), *_keys_beginning(incomplete)]


LoadSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A batching parameter of the launched server, e.g. max_batch_size=8, whether the scenario searches it or "
        "not; or a key of the scenario, e.g. load.duration=10s.",
        autocompletion=_keys_and_parameters_beginning,
    ),
]


MaxRegressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max-regress",
        "--max-regression",
        metavar="FIGURE=MARGIN,…",
        help="How much worse a figure may get, e.g. p95=5%,throughput=3%; replaces the scenario's margins. Figures: "
        "throughput, capacity, p50, p95, p99, errors, cpu, gpu, memory, gpu_memory, startup.",
    ),
]


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


_SLO_NAMES: Final = ("p50", "p90", "p95", "p99", "p99.9", "errors")


def _slo_option(name: str) -> Any:
    metavar, text = "DURATION", "Latency limit such as 20ms; those given replace the scenario's."
    if name == "errors":
        metavar, text = "RATIO", "Share of requests that may fail, such as 0.1%; replaces the scenario's."
    return Annotated[str | None, typer.Option(f"--slo-{name}", metavar=metavar, help=text)]


takes_slo = _takes(
    "slo",
    {f"slo_{name.replace('.', '_')}": (_slo_option(name), None) for name in _SLO_NAMES},
    lambda values: {
        name: text for name, text in zip(_SLO_NAMES, values.values(), strict=True) if text is not None
    },
)
"""Decorator that adds --slo-p50 to --slo-errors; the command's parameter `slo` gets name -> text of those
given."""


def _request(values: Mapping[str, Any]) -> list[str]:
    from batchtune.cli.arguments.overrides import request_overrides

    return request_overrides(
        rest=values["rest"], rows=values["rows"], shapes=values["shape"], ranges=values["range_"]
    )


takes_request = _takes(
    "request",
    {
        "rest": (RestOption, False),
        "rows": (RowsOption, None),
        "shape": (ShapeOption, None),
        "range_": (RangeOption, None),
    },
    _request,
)
"""Decorator that adds --rest, --rows, --shape and --range; the command's parameter `request` gets them as
--set overrides."""


def examples(*lines: str) -> str:
    """Return the text below a command's help that lists examples; its first line, a backspace, keeps typer
    from joining lines."""
    return "\n".join(["\b", "Examples:", *(f"  batchtune {line}" for line in lines)])


# Which words say how the two sides of a check differ?

BASELINE, CANDIDATE = "baseline", "candidate"
SIDES: Final = (BASELINE, CANDIDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideWords:
    """What the options of one side of a check say; None or empty: as in the scenario.

    `model`: its path. `ref`: git commit of the model. `image`: container image. `command`: of the server.
    `batching`: file of batching parameters. `flag`: NAME=VALUE for the server. `set`: KEY=VALUE for the
    scenario.
    """

    model: str | None = None
    ref: str | None = None
    image: str | None = None
    command: str | None = None
    batching: str | None = None
    flag: Sequence[str] = ()
    set: Sequence[str] = ()


_WORDS: Final[Mapping[str, tuple[Any, str, str]]] = {
    "model": (str | None, "PATH", "The model of the {side}. Default: the scenario's."),
    "ref": (str | None, "GIT_REF", "That model as it is in a git commit, e.g. {ref}."),
    "image": (str | None, "IMAGE", "The container image that serves the {side}."),
    "command": (str | None, "COMMAND", "The server of the {side}, as target.command, quoted."),
    "batching": (
        str | None,
        "FILE",
        "Batching parameters of the {side}: TensorFlow Serving's file, config.pbtxt, …",
    ),
    "flag": (list[str] | None, "NAME=VALUE", "A flag of the {side}'s server; may be repeated."),
    "set": (list[str] | None, "KEY=VALUE", "A key of the scenario, for the {side} only; may be repeated."),
}


def _side_option(side: str, word: str) -> Any:
    kind, metavar, text = _WORDS[word]
    help_text = text.format(side=side, ref="main" if side == BASELINE else "HEAD")
    return Annotated[kind, typer.Option(f"--{side}-{word}", metavar=metavar, help=help_text)]


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
    {f"{side}_{word}": (_side_option(side, word), None) for side in SIDES for word in _WORDS},
    lambda values: {
        side: _side_words(side, {word: values[f"{side}_{word}"] for word in _WORDS}) for side in SIDES
    },
)
"""Decorator that adds --baseline-model to --candidate-set; the command's parameter `sides` gets side ->
`SideWords`."""
