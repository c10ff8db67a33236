"""Writes the command line that starts a server with what was recommended."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from batchtune.archive.server_files import MODELS_CONFIG, base_path_of, beside, own_file, versions_of
from batchtune.batching.parameters import LENGTH_BUCKETS, Configuration, flag_text
from batchtune.errors import UsageError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import FILE_PLACE, JSON_PLACE, PORT_PLACES, DockerSpec, TargetSpec
from batchtune.system import absolute
from batchtune.target.container import MODELS_INSIDE, SCRATCH_INSIDE, tfservings_container, tritons_container
from batchtune.target.model_files import STAGES_FILE, lies_bare, located_model, served_name, version_files
from batchtune.target.settings import with_places
from batchtune.target.tfserving import OWN_PARAMETERS, THREAD_LIMITS, demand_of, thread_limits
from batchtune.target.triton import flag_words

_TENSORFLOWS = "tensorflow_model_server"
_OURS = "batchtune-model-server"

PORTS = ("--port=8500", "--rest_api_port=8501")
"""The ports for gRPC and REST that TensorFlow Serving's documentation uses."""


BUNDLED_FLAGS: Final = frozenset(
    {
        "allow_model_code",
        "batch_retry_delay_micros",
        "batch_retry_max_time_micros",
        "batch_scheduler",
        "batching_stage",
        "device",
        "enable_grpc_reflection",
        "enable_tuning_api",
        "host",
        LENGTH_BUCKETS,
        "processes_per_replica",
        "rest_api_enable_gzip_answers",
        "rest_api_max_body_bytes",
        "threads_per_process",
        "torch_dtype",
        "zero_padding",
    }
)
"""Flags that only the bundled server has; tensorflow_model_server refuses them."""


def deployment(
    configuration: Configuration,
    scenario: Scenario,
    parameters_file: Path,
    *,
    recommend: str = "batchtune recommend",
) -> str:
    """Return the shell command that deploys the recommended configuration; several, where the model is copied
    first.

    For Triton it copies the parameters into the model repository; for kind command it writes them, and runs the
    target's own command; for a server of kind http that reads a file or takes a request it is a sentence with
    the values to set there. A model whose path is gone is written as
    PATH/…; a sample model as a command that prints its path. `recommend`: the command that gives this answer
    again.
    """
    if scenario.target.models:
        return "\n".join(_of_several_models(configuration, scenario, parameters_file))
    if scenario.target.kind == "command":
        return _by_commands(scenario.target, recommend)
    if configuration.dialect == "http":
        return _by_settings(configuration, scenario)
    if configuration.dialect == "triton":
        model = Path(scenario.target.model)
        folder = model if model.is_dir() else Path("MODEL_REPOSITORY") / served_name(scenario.target.model)
        return f"cp {shlex.quote(str(parameters_file))} {shlex.quote(str(folder / 'config.pbtxt'))}"
    model = _lying(scenario.target)
    server = server_of(configuration, scenario.target, [model])
    name = deployed_name(configuration, scenario.target)
    copying, base_path = "", _base_path(model, scenario.target)
    if lies_bare(model):  # it is copied into a folder where the command is run
        version = Path("served") / name / "1"
        copying = f"{_copying(model, version)} && "
        base_path = f'"$PWD"/{shlex.quote(str(version.parent))}'
    words = [f"--model_name={name}", *PORTS]
    if configuration.batching is not None:
        words += ["--enable_batching", f"--batching_parameters_file={parameters_file}"]
    words += _flag_words(configuration, scenario, server)
    return f"{copying}{server} --model_base_path={base_path} {shlex.join(words)}{_as_measured(scenario)}"


def _as_measured(scenario: Scenario) -> str:
    """Return a comment of a shell on what the measured server had that the command leaves out; "" for a server that
    had all CPUs."""
    cpus = scenario.target.cpus
    if cpus is None or scenario.target.runs != "bundled":
        return ""
    pinned = f"taskset -c {','.join(map(str, cpus))}"
    return f"\n# measured under {pinned} and with --monitoring_config_file, which the command leaves out"


def _of_several_models(configuration: Configuration, scenario: Scenario, file: Path) -> list[str]:
    """Return the commands for several models: copy models without version directories, and each model's own parameters
    into its version directories; start the server.

    PATH represents the parent folder of a model whose directory is not known, here and in the file with the
    list of models.
    """
    models = {own.name: own.model for own in scenario.target.models}
    server = server_of(configuration, scenario.target, map(Path, models.values()))
    words = [
        *shlex.split(server),
        f"--model_config_file={beside(file, MODELS_CONFIG)}",
        *PORTS,
    ]
    base_paths = {own.name: base_path_of(file, own) for own in scenario.target.models}
    bare = {name: Path(model) for name, model in models.items() if lies_bare(Path(model))}
    copies = [_copying(absolute(model), base_paths[name] / "1") for name, model in bare.items()]
    if configuration.batching is not None:
        words += ["--enable_batching", f"--batching_parameters_file={file}"]
    if configuration.models:
        words.insert(-1, "--enable_per_model_batching_parameters")
        copies += [
            shlex.join(["cp", str(own_file(file, name)), str(version / OWN_PARAMETERS)])
            for name, _ in configuration.models
            for version in versions_of(models[name])
            or [base_paths[name] / ("1" if name in bare else "VERSION")]
        ]
    command = shlex.join([*words, *_flag_words(configuration, scenario, server)])
    return [*copies, f"{command}{_as_measured(scenario)}"]


def server_of(configuration: Configuration, target: TargetSpec, models: Iterable[Path]) -> str:
    """Return the program to deploy with, as words of a shell.

    It is the measured one, but tensorflow_model_server in place of the bundled server where it is installed, or
    the target is a container, and it can serve the same models with the same flags. `models`: where they lie.
    """
    if target.runs in ("local", "command"):
        return shlex.join(target.command or (_TENSORFLOWS,))
    able = not BUNDLED_FLAGS & _flags(configuration, target).keys() and all(map(_is_saved_model, models))
    if able and (target.runs == "docker" or shutil.which(_TENSORFLOWS)):
        return _TENSORFLOWS
    return _OURS


def deployed_name(configuration: Configuration, target: TargetSpec) -> str:
    """Return the name under which the server served the model in the trials: its flag `model_name`, else the
    path's last part."""
    flags = {**target.flag_texts, **dict(configuration.flags)}
    return (flags.get("model_name") if target.kind == "tfserving" else "") or served_name(target.model)


def as_started(configuration: Configuration, scenario: Scenario) -> Configuration:
    """Return the configuration with all flags that the server had in every trial, those of the scenario's
    target included.

    For Triton unchanged: flags are no part of its configuration.
    """
    if configuration.dialect == "triton":
        return configuration
    target = scenario.target
    flags = {**thread_limits(target, demand_of(scenario)), **_flags(configuration, target)}
    return replace(configuration, flags=tuple(sorted(flags.items())))


def _flags(configuration: Configuration, target: TargetSpec) -> dict[str, str]:
    """Return the flags of the server by name: those of the target and of the configuration, without ports and
    model name."""
    flags = {**target.flag_texts, **dict(configuration.flags)}
    set_by_command = ("port", "rest_api_port", "model_name")
    return {name: text for name, text in flags.items() if name not in set_by_command}


def _flag_words(configuration: Configuration, scenario: Scenario, server: str) -> list[str]:
    target = scenario.target
    if server != _OURS:  # ours holds no thread for a request that waits
        own = (
            {} if target.runs == "command" else dict.fromkeys(THREAD_LIMITS, str(demand_of(scenario).threads))
        )
    else:
        own = {} if target.device == "auto" else {"device": target.device}
    flags = {**own, **_flags(configuration, target)}
    return [f"--{name}={text}" for name, text in flags.items()]


def _by_commands(target: TargetSpec, recommend: str) -> str:
    """Return the commands for a target of kind command: write the parameters to a file, then run the target's
    own command.

    Where that command names no file, the parameters go to its stdin. `;` and not `&&` joins them, because
    `recommend` also writes where it exits with 5.
    """
    words = target.apply or target.launch or ()
    dialects = {FILE_PLACE: target.render or "json", JSON_PLACE: "json"}
    files = {place: "FILE" for place in dialects if any(place in word for word in words)}
    if len(files) > 1:
        files[JSON_PLACE] = "FILE.json"
    filled = [
        word.replace(FILE_PLACE, "FILE").replace(JSON_PLACE, files.get(JSON_PLACE, "")) for word in words
    ]
    given = "" if files else " < FILE"
    writing = "".join(
        f"{recommend} --format {dialects[place]} --write {file}; "
        for place, file in (files or {JSON_PLACE: "FILE"}).items()
    )
    return f"{writing}{shlex.join(filled)}{given}"


def _by_settings(configuration: Configuration, scenario: Scenario) -> str:
    """Return the command that starts a server of kind http, with its variables and flags.

    Where the server reads a file or takes a request instead, a sentence with the values to set there; ""
    where no parameter can be set.
    """
    target = with_places(scenario.target, dict(zip(PORT_PLACES, ("8000", "8001", "8002"), strict=True)))
    values, setting = configuration.server_values(scenario.request.rows_most), target.set
    if setting is None:
        return ""
    named = {name: flag_text(value) for name, value in values.items()}
    given = [
        f"{variable}={shlex.quote(named[name])}" for name, variable in setting.env.items() if name in named
    ]
    flags = [word for name, flag in setting.flag.items() if name in named for word in (flag, named[name])]
    start = shlex.join([*(target.launch or ()), *flags])
    if setting.file is not None:
        where = setting.file.path.removeprefix("{scratch}/")  # a folder that lasts as long as a sweep
    elif setting.request is not None:
        where = setting.request.url
    else:
        return " ".join([*given, start])
    return f"set {', '.join(f'{name}: {text}' for name, text in named.items())} in {where}"


def docker_command(configuration: Configuration, scenario: Scenario, parameters_file: Path) -> str:
    """Return the `docker run` that starts a server with the recommended configuration: one line that ends
    with a newline.

    Model and parameters file are mounted read-only; a model whose path is gone is written as PATH/….
    """
    file = parameters_file.resolve() if parameters_file.is_file() else parameters_file
    target = scenario.target.model_copy(update={"cpus": None})
    if configuration.dialect == "triton":
        return shlex.join(_tritons_words(configuration, target, file)) + "\n"
    model, name = _lying(target), deployed_name(configuration, target)
    mounts = _mounts(model, name)
    args = [*PORTS, f"--model_name={name}", f"--model_base_path={MODELS_INSIDE}/{name}"]
    if configuration.batching is not None:
        inside = f"{SCRATCH_INSIDE}/batching_parameters.txt"
        mounts[file] = inside
        args += ["--enable_batching=true", f"--batching_parameters_file={inside}"]
    is_ours = _needs_ours(configuration, target, model)
    args += _flag_words(configuration, scenario, _OURS if is_ours else _TENSORFLOWS)
    if target.runs != "docker":
        # As docker/README.md builds it, with -cuda for GPUs; for models that are no SavedModel.
        own_image = "batchtune-server-cuda" if _on_cuda(target) else "batchtune-server"
        gpus = "all" if _on_cuda(target) else None
        docker = DockerSpec(image=own_image if is_ours else None, gpus=gpus)
        target = target.model_copy(update={"docker": docker})
    words = tfservings_container(target, ports=(8500, 8501), mounts=mounts)
    if is_ours:
        words.remove("--entrypoint=tensorflow_model_server")
        args = args[len(PORTS) :]  # the image names them
    return shlex.join([*words, *args]) + "\n"


def build_command(configuration: Configuration, scenario: Scenario) -> str:
    """Return the command that builds the image of `docker_command` in a clone of batchtune; "" where the image is not
    batchtune's."""
    target = scenario.target
    model = _lying(target)
    if configuration.dialect == "triton" or not _needs_ours(configuration, target, model):
        return ""
    if _on_cuda(target):
        return "docker/build.sh server-cuda"
    of_torch = target.framework in ("torch", "torchscript") or _is_torch_model(model)
    return f"{'TORCH=torch ' if of_torch else ''}docker/build.sh server"


def _is_torch_model(model: Path) -> bool:
    return model.suffix in (".pt", ".pt2") or any(
        file.suffix in (".pt", ".pt2") for pattern in ("model.*", "*/model.*") for file in model.glob(pattern)
    )


def _needs_ours(configuration: Configuration, target: TargetSpec, model: Path) -> bool:
    """Whether only the bundled server's image can serve what was measured; False for a model that was served
    in a container."""
    if target.runs == "docker":
        return False
    if BUNDLED_FLAGS & _flags(configuration, target).keys() or target.framework in ("torch", "torchscript"):
        return True
    return not _is_saved_model(model) and (model.exists() or _on_cuda(target))


def _on_cuda(target: TargetSpec) -> bool:
    return target.device.startswith("cuda")


def _tritons_words(configuration: Configuration, target: TargetSpec, file: Path) -> list[str]:
    name = served_name(target.model)
    docker = target.docker or DockerSpec()
    image = docker.image or "nvcr.io/nvidia/tritonserver:26.04-py3"
    target = target.model_copy(update={"docker": docker.model_copy(update={"image": image})})
    model = Path(target.model)
    folder = model.resolve() if model.is_dir() else Path("MODEL_REPOSITORY") / name
    inside = f"{MODELS_INSIDE}/{name}"
    mounts = {folder: inside, file: f"{inside}/config.pbtxt"}
    words = tritons_container(target, ports=(8000, 8001, 8002), mounts=mounts)
    flags = {**target.flag_texts, **configuration.server_flags}
    for said_otherwise in ("http-port", "grpc-port", "metrics-port", "load-model"):
        flags.pop(said_otherwise, None)
    return [*words, f"--model-repository={MODELS_INSIDE}", *flag_words(flags)]


def _lying(target: TargetSpec) -> Path:
    """Return the path of the target's model; where there is none, what the scenario says: a sample model, or
    a path that is gone."""
    try:
        return located_model(target.model)
    except UsageError:
        return Path(target.model)


def _mounts(model: Path, name: str) -> dict[Path, str]:
    """Return what the container mounts: path on this machine -> path in the container, with a version
    directory."""
    inside = f"{MODELS_INSIDE}/{name}"
    if model.is_file():
        return {file.resolve(): f"{inside}/1/{own}" for own, file in version_files(model).items()}
    if not model.is_dir():
        return {Path("PATH") / served_name(str(model)): inside}
    return {model.resolve(): f"{inside}/1" if lies_bare(model) else inside}


def _is_saved_model(model: Path) -> bool:
    """Whether the model is a SavedModel that tensorflow_model_server can serve; one split into stages it
    cannot."""
    folders = [file.parent for file in (*model.glob("*/saved_model.pb"), model / "saved_model.pb")]
    return any((folder / "saved_model.pb").is_file() for folder in folders) and not any(
        (folder / STAGES_FILE).is_file() for folder in folders
    )


def _copying(model: Path, version: Path) -> str:
    """Return the shell commands that copy a model without a version directory into this one, joined by `&&`."""
    if model.is_dir():
        copies = {f"{model}/.": version}
    else:
        copies = {str(file): version / own for own, file in version_files(model).items()}
    folders = sorted({str(version), *(str(place.parent) for place in copies.values() if model.is_file())})
    commands = [["mkdir", "-p", *folders], *(["cp", "-r", *map(str, copy)] for copy in copies.items())]
    return " && ".join(map(shlex.join, commands))


def _base_path(model: Path, target: TargetSpec) -> str:
    """Return the model's base path as a word of a shell."""
    if model.is_dir():
        return shlex.quote(str(absolute(model)))
    if model.name != target.model:
        return shlex.quote(str(Path("PATH") / served_name(target.model)))
    chosen = "" if target.framework is None else f" --framework {target.framework}"
    return f'"$(python -m batchtune.sample_models {shlex.quote(model.name)}{chosen})"'
