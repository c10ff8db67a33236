"""Parses the server's command line.

The flags are tensorflow_model_server's, with its defaults (main.cc, server.h), and some of our own. Flags
without effect here are accepted with a note; unknown ones are refused, as are those that promise a protection
we lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from batchtune.errors import UsageError
from batchtune.system import is_loopback

_BOOLEANS = dict.fromkeys(("true", "1", "t", "yes", "y"), True) | dict.fromkeys(
    ("false", "0", "f", "no", "n"), False
)


def _flag(default: Any, meaning: str, *, choices: tuple[str, ...] = (), ours: bool = False) -> Any:
    return field(default=default, metadata={"help": meaning, "choices": choices, "ours": ours})


def _switch(meaning: str, *, default: bool = False, ours: bool = False) -> Any:
    return _flag(default, meaning, ours=ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """The value of every flag that has an effect, by the flag's name."""

    port: int = _flag(8500, "gRPC port; 0: no gRPC")
    grpc_socket_path: str = _flag("", "Unix socket on which gRPC is served too")
    ssl_config_file: str = _flag("", "text SSLConfig: gRPC by TLS; REST is not encrypted")
    grpc_channel_arguments: str = _flag(
        "",
        "k=v,k=v; grpc.max_ concurrent_streams, receive_message_length, connection_age_ms, connection_age_grace_ms",
    )
    rest_api_port: int = _flag(0, "REST port, also of the metrics; 0: no REST; must differ from --port")
    rest_api_timeout_in_ms: int = _flag(30000, "limit of a REST request, in the queue and in the model")
    rest_api_enable_cors_support: bool = _switch("answer CORS preflights, allow all origins")
    enable_batching: bool = _switch("merge requests into batches")
    batching_parameters_file: str = _flag("", "text BatchingParameters; needs --enable_batching")
    enable_per_model_batching_parameters: bool = _switch(
        "read batching_params.pbtxt in each version directory; without one: not batched"
    )
    model_name: str = _flag("default", "name of the model under --model_base_path")
    model_base_path: str = _flag("", "directory of numeric version directories")
    model_config_file: str = _flag("", "text ModelServerConfig: several models, versions, labels")
    model_config_file_poll_wait_seconds: int = _flag(0, "how often to re-read the file; 0: never")
    file_system_poll_wait_seconds: int = _flag(1, "how often to look for versions; 0: only at the start")
    num_load_threads: int = _flag(0, "models loaded at once; 0: one")
    max_num_load_retries: int = _flag(5, "retries of a failed load")
    load_retry_interval_micros: int = _flag(60_000_000, "pause before a retry")
    tensorflow_session_parallelism: int = _flag(0, "intra- and inter-op threads; 0: TensorFlow's choice")
    tensorflow_intra_op_parallelism: int = _flag(0, "threads within an operation; 0: the framework's choice")
    tensorflow_inter_op_parallelism: int = _flag(0, "threads over operations; 0: the framework's choice")
    tensorflow_session_config_file: str = _flag("", "text ConfigProto of the TensorFlow session")
    per_process_gpu_memory_fraction: float = _flag(
        0.0, "share of GPU memory taken at the start; 0: as needed"
    )
    saved_model_tags: str = _flag("serve", "comma-separated tags of the graph to load")
    enable_model_warmup: bool = _switch("run the model before it becomes AVAILABLE", default=True)
    num_request_iterations_for_warmup: int = _flag(0, "runs of each warm-up request; 0: one")
    monitoring_config_file: str = _flag("", "text MonitoringConfig with prometheus_config { enable, path }")
    enable_grpc_healthcheck_service: bool = _switch("serve grpc.health.v1.Health")
    enable_serialization_as_tensor_content: bool = _switch(
        "answer gRPC with tensor_content, not *_val fields"
    )
    enable_signature_method_name_check: bool = _switch("Predict only signatures with the predict method")
    allow_version_labels_for_unavailable_models: bool = _switch(
        "accept labels of versions that are not AVAILABLE"
    )
    rest_api_max_body_bytes: int = _flag(
        64 << 20, "a longer REST request body, as sent or inflated, is refused", ours=True
    )
    rest_api_enable_gzip_answers: bool = _switch(
        "compress answers to REST clients that accept gzip", ours=True
    )
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0: all", ours=True)
    batch_scheduler: str = _flag(
        "shared", "the library's scheduler", choices=("shared", "streaming"), ours=True
    )
    batch_retry_max_time_micros: int = _flag(0, "how long to retry a full queue; 0: fail at once", ours=True)
    batch_retry_delay_micros: int = _flag(100, "pause between such retries", ours=True)
    zero_padding: bool = _switch(
        "with pad_variable_length_inputs: pad with zeros, not with the first element", ours=True
    )
    length_buckets: str = _flag(
        "", "32,64,128: lengths up to which requests share a queue; auto: by the requests", ours=True
    )
    batching_stage: str = _flag(
        "device",
        "what is batched of a model with stages.yaml",
        choices=("device", "unit", "early"),
        ours=True,
    )
    allow_model_code: bool = _switch("run the code, and query the stores, that stages.yaml names", ours=True)
    processes_per_replica: int = _flag(
        0, "Cortex: batch threads, and with --threads_per_process the limit of requests in flight", ours=True
    )
    threads_per_process: int = _flag(
        0,
        "Cortex: processes_per_replica * this many requests in flight, more wait; 0: no limit",
        ours=True,
    )
    enable_tuning_api: bool = _switch("GET, PUT /v1/tuning/batching_parameters; loopback only", ours=True)
    enable_grpc_reflection: bool = _switch("serve grpc.reflection, for tools such as grpcurl", ours=True)
    device: str = _flag("auto", "where models run: auto, cpu, cuda or cuda:N", ours=True)
    torch_dtype: str = _flag(
        "as_exported",
        "precision that a PyTorch model computes in; its signature stays",
        choices=("as_exported", "float32", "float16", "bfloat16"),
        ours=True,
    )

    @property
    def intra_op_threads(self) -> int:
        """Threads within an operation, of every framework; 0: the framework's choice."""
        return self.tensorflow_session_parallelism or self.tensorflow_intra_op_parallelism

    @property
    def inter_op_threads(self) -> int:
        """Threads over operations, of every framework; 0: the framework's choice."""
        return self.tensorflow_session_parallelism or self.tensorflow_inter_op_parallelism

    @property
    def wants_cuda(self) -> bool:
        """Whether a GPU is required; with `auto` it is only used if there is one."""
        return self.device.startswith("cuda")

    @property
    def cuda_index(self) -> int:
        """N where `device` is cuda:N, else 0."""
        return int(self.device.partition(":")[2] or 0)


# Accepted with a note: (type, why it has no effect here).
_WITHOUT_EFFECT: dict[str, tuple[type, str]] = {
    "grpc_max_threads": (int, "no request occupies a thread here; see --threads_per_process for a limit"),
    "rest_api_num_threads": (int, "no request occupies a thread here; see --threads_per_process for a limit"),
    "num_unload_threads": (int, "versions are unloaded one at a time"),
    "flush_filesystem_caches": (bool, "file caches are left to the kernel"),
    "platform_config_file": (str, "the files of a version directory decide its platform"),
    "enable_profiler": (bool, "there is no profiler service"),
    "prefer_tflite_model": (bool, "TensorFlow Lite models are not served"),
    "num_tflite_pools": (int, "TensorFlow Lite models are not served"),
    "num_tflite_interpreters_per_pool": (int, "TensorFlow Lite models are not served"),
    "xla_cpu_compilation_enabled": (
        bool,
        "set TF_XLA_FLAGS=--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit instead",
    ),
    "xla_gpu_compilation_enabled": (bool, "set TF_XLA_FLAGS=--tf_xla_auto_jit=2 instead"),
    "mixed_precision": (str, "models run in the precision they were exported with"),
    "thread_pool_factory_config_file": (str, "there is one kind of thread pool"),
    "remove_unused_fields_from_bundle_metagraph": (bool, "the graph is not kept after loading"),
    "skip_initialize_tpu": (bool, "TPUs are not used"),
}


def parse_flags(arguments: Sequence[str]) -> tuple[str, ServerFlags, list[str]]:
    """Parse `--flag=value`, `--flag value` and `--switch`; names may be written with dashes or underscores.

    Returns ("serve", flags, notes for stderr), or ("help" or "version", the default flags, no notes).

    Raises:
        UsageError: an unknown flag, a value of a wrong type or range, or flags that contradict each other.
    """
    known: dict[str, type] = {flag.name: type(flag.default) for flag in fields(ServerFlags)}
    known |= {name: kind for name, (kind, _) in _WITHOUT_EFFECT.items()}
    refused = "use_alts_credentials"  # when switched on: ignoring it would leave traffic unprotected
    known[refused] = bool
    values: dict[str, Any] = {}
    notes = []
    for name, text in _pairs(arguments, known):
        if name in {"help", "version"}:
            return name, ServerFlags(), []
        value = _typed(name, known[name], text)
        if name in _WITHOUT_EFFECT:
            notes.append(f"note: --{name} has no effect: {_WITHOUT_EFFECT[name][1]}")
        elif name != refused:
            values[name] = value
        elif value:
            raise UsageError(
                f"--{name}: this server does not speak ALTS",
                hint="give --ssl_config_file, or put a proxy that does in front of it",
            )
    flags = ServerFlags(**values)
    _check(flags)
    if flags.length_buckets and not flags.enable_batching:
        notes.append("note: --length_buckets has no effect without --enable_batching")
    return "serve", flags, notes


def help_text() -> str:
    """Return the text of --help: all flags with their defaults."""
    lines = [
        "usage: batchtune-model-server --model_base_path=DIR [--model_name=NAME] [flags]",
        "",
        "Serves models over gRPC and REST as tensorflow_model_server does, with its flags.",
        "DIR/<version>/ holds saved_model.pb, model.onnx, model.pt2, model.pt or emulated.yaml.",
        "",
        "  batchtune-model-server --model_base_path=/models/imdb --model_name=imdb --rest_api_port=8501",
        "  batchtune-model-server --model_base_path=/models/imdb --rest_api_port=8501 \\",
        "      --enable_batching --batching_parameters_file=batching_parameters.txt",
    ]
    for heading, ours in (("tensorflow_model_server's flags:", False), ("flags of our own:", True)):
        lines += ["", heading]
        lines += [_help_line(flag) for flag in fields(ServerFlags) if flag.metadata["ours"] is ours]
    lines += ["  --version", "  --help", "", "accepted, without effect:"]
    lines += [f"  --{name}: {why}" for name, (_, why) in _WITHOUT_EFFECT.items()]
    return "\n".join(lines) + "\n"


def _pairs(arguments: Sequence[str], known: dict[str, type]) -> Iterator[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if argument in {"-h", "--help", "--version"}:
            yield "version" if argument == "--version" else "help", ""
            return
        if not argument.startswith("--") or name not in known:
            raise _unknown(argument, name, known)
        if equals:
            yield name, text
        elif known[name] is bool:
            yield name, rest.pop(0) if rest and rest[0].lower() in _BOOLEANS else "true"
        elif rest:
            yield name, rest.pop(0)
        else:
            raise UsageError(f"--{name}: a value is missing", hint=f"write --{name}=VALUE")


def _unknown(argument: str, name: str, known: dict[str, type]) -> UsageError:
    if not argument.startswith("--"):
        return UsageError(f"unknown argument: {argument}", hint="flags begin with --; see --help")
    batching = ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads")
    if name in batching or name in {"allowed_batch_sizes", "max_execution_batch_size"}:
        hint = f"put '{name} {{ value: N }}' in a file and give --enable_batching --batching_parameters_file=FILE"
        return UsageError(f"unknown argument: {argument}", hint=hint)
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    return UsageError(
        f"unknown argument: {argument}", hint=f"did you mean --{near[0]}?" if near else "see --help"
    )


def _typed(name: str, kind: type, text: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        raise UsageError(f"--{name}={text}: expected true or false")
    try:
        return kind(text)
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(f"--{name}={text}: expected {expected}") from error


def _check(flags: ServerFlags) -> None:
    # Values that no longer exist, and what takes their place.
    removed = {
        "batch_scheduler=adaptive": "it no longer exists: take shared, and let a sweep choose num_batch_threads"
    }
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        choices = flag.metadata["choices"]
        if choices and value not in choices:
            hint = removed.get(f"{flag.name}={value}", "")
            raise UsageError(f"--{flag.name}={value}: expected {', '.join(choices)}", hint=hint)
        if isinstance(value, (int, float)) and value < 0 and flag.name != "file_system_poll_wait_seconds":
            raise UsageError(f"--{flag.name}={value}: expected 0 or more")
        # Of 64 and of 32 bits in tensorflow_model_server.
        most = 2**53 if flag.name.endswith(("_micros", "_bytes")) else 2**31 - 1
        if isinstance(value, (int, float)) and not value <= most:
            raise UsageError(f"--{flag.name}={value}: expected {most} or less")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", flags.device):
        raise UsageError(f"--device={flags.device}: expected auto, cpu, cuda or cuda:N")
    for name in ("port", "rest_api_port"):
        if getattr(flags, name) > 65535:
            raise UsageError(f"--{name}={getattr(flags, name)}: expected a port, 0 to 65535")
    if flags.port == flags.rest_api_port:
        raise UsageError(
            "--port and --rest_api_port must differ"
            if flags.port
            else "--port and --rest_api_port are both 0",
            hint="give each its own port; 0 switches one of them off",
        )
    if not flags.model_name:
        raise UsageError("--model_name=: a model needs a name")
    if not flags.model_base_path and not flags.model_config_file:
        raise UsageError(
            "Both server_options.model_base_path and server_options.model_config_file are empty!",
            hint="give --model_base_path=DIR",
        )
    _check_combinations(flags)


def _check_combinations(flags: ServerFlags) -> None:
    if flags.batching_parameters_file and not flags.enable_batching:
        raise UsageError(
            "server_options.batching_parameters_file is set without setting server_options.enable_batching "
            "to true.",
            hint="add --enable_batching",
        )
    if flags.enable_per_model_batching_parameters and not flags.enable_batching:
        raise UsageError("--enable_per_model_batching_parameters needs --enable_batching")
    if flags.tensorflow_session_parallelism and (
        flags.tensorflow_intra_op_parallelism or flags.tensorflow_inter_op_parallelism
    ):
        raise UsageError(
            "--tensorflow_session_parallelism sets both intra- and inter-op parallelism",
            hint="give either it or the other two",
        )
    if flags.enable_tuning_api and not is_loopback(flags.host):
        raise UsageError(
            f"--enable_tuning_api is for loopback only; --host={flags.host} is not",
            hint="bind 127.0.0.1, or leave the tuning API off",
        )
    if bool(flags.processes_per_replica) != bool(flags.threads_per_process):
        raise UsageError("--processes_per_replica and --threads_per_process go together")


def _help_line(flag: Field[Any]) -> str:
    default = str(flag.default).lower() if isinstance(flag.default, bool) else flag.default
    choices = f" ({', '.join(flag.metadata['choices'])})" if flag.metadata["choices"] else ""
    shown = default if default != "" else '""'
    return f"  --{flag.name}={shown}\n        {flag.metadata['help']}{choices}"
