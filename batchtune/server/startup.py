"""Makes the server's settings from the flags and the files that they name, or finds what is wrong there."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from batchtune.batching import text_proto
from batchtune.batching.parameters import BatchingParameters, parse_length_buckets, validate
from batchtune.batching.tfserving_file import parse_tfserving_text
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.server.log import note
from batchtune.server.models.model_config import ModelConfig, local_path, read_model_config_file
from batchtune.server.models.servable import ConcurrencyLimit
from batchtune.server.scheduling.batch_threads import THREADS_MAX
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.stages.stages import check_allowed
from batchtune.server.stages.stages_file import DeclaredStages, read_stages_file
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.status import StatusError


def batching_settings(flags: ServerFlags) -> BatchingSettings:
    """Make the batching settings to start with.

    Raises:
        UsageError: a file that cannot be read, parameters that TF Serving refuses, more than THREADS_MAX
            threads, length buckets that do not ascend.
    """
    parameters = BatchingParameters()
    if flags.batching_parameters_file:
        parameters = read_batching_parameters(Path(flags.batching_parameters_file))
    settings = BatchingSettings(
        enabled=flags.enable_batching,
        parameters=parameters,
        scheduler=flags.batch_scheduler,  # type: ignore[arg-type]  # its choices are checked
        per_model=flags.enable_per_model_batching_parameters,
        zero_padding=flags.zero_padding,
        retry_max_time_micros=flags.batch_retry_max_time_micros,
        retry_delay_micros=flags.batch_retry_delay_micros,
        default_num_batch_threads=flags.processes_per_replica or None,
        length_buckets=parse_length_buckets(flags.length_buckets),
    )
    if settings.num_batch_threads > THREADS_MAX:
        said = flags.batching_parameters_file if parameters.num_batch_threads else "--processes_per_replica"
        raise UsageError(
            f"{said}: num_batch_threads must be at most {THREADS_MAX}; was {settings.num_batch_threads}"
        )
    return settings


def read_batching_parameters(path: Path) -> BatchingParameters:
    """Read and check a text BatchingParameters file.

    Raises:
        UsageError: a file that cannot be read or parsed, or values that TF Serving refuses, in its words.
    """
    text = _read_text(path, f"{path}", hint="give a text BatchingParameters file")
    parameters = parse_tfserving_text(text, source=str(path))
    try:
        validate(parameters)
    except BatchingParametersError as error:
        raise BatchingParametersError(f"{path}: {error.message}", hint=error.hint) from error
    return parameters


def own_batching_parameters(version_directory: Path) -> BatchingParameters | None:
    """Read a version's batching_params.pbtxt; None: it has no such file.

    Raises:
        StatusError: INVALID_ARGUMENT where the file is wrong.
    """
    path = version_directory / "batching_params.pbtxt"
    if not path.is_file():
        return None
    try:
        return read_batching_parameters(path)
    except UsageError as error:
        raise StatusError("INVALID_ARGUMENT", error.message) from error


def declared_stages(version_directory: Path, flags: ServerFlags) -> DeclaredStages | None:
    """Read a version's stages.yaml and check that the flags allow it; None: it has no such file.

    Raises:
        StatusError: INVALID_ARGUMENT where the file is wrong, FAILED_PRECONDITION without a needed --allow_model_code.
    """
    declared = read_stages_file(version_directory)
    if declared is not None:
        check_allowed(declared, allow_code=flags.allow_model_code)
    return declared


def configured_models(flags: ServerFlags) -> tuple[ModelConfig, ...]:
    """Return the models of --model_config_file; without that flag, the model of --model_base_path.

    Raises:
        UsageError: a configuration file or base path that cannot be used.
    """
    if flags.model_config_file:
        return read_model_config_file(Path(flags.model_config_file), may_be_empty=True)
    try:
        base_path = local_path(flags.model_base_path).expanduser().absolute()
    except (RuntimeError, StatusError) as error:
        raise UsageError(f"--model_base_path={flags.model_base_path}: {error}") from error
    return (ModelConfig(name=flags.model_name, base_path=base_path),)


def concurrency_limit(flags: ServerFlags, settings: BatchingSettings) -> ConcurrencyLimit | None:
    """Make Cortex's limit on the requests inside the server; None: no limit.

    Raises:
        UsageError: a max_batch_size above the limit, so that no batch could ever be full.
    """
    processes, threads = flags.processes_per_replica, flags.threads_per_process
    if not processes:
        return None
    limit = processes * threads
    size = settings.parameters.max_batch_size if settings.enabled else None
    if size is not None and size > limit:
        raise UsageError(
            f"max_batch_size ({size}) must be less than or equal to processes_per_replica * threads_per_process "
            f"({processes} * {threads} = {limit})"
        )
    return ConcurrencyLimit(limit)


def monitoring_path(flags: ServerFlags) -> str | None:
    """Return the URL path of the metrics page, by --monitoring_config_file; None: no page.

    Raises:
        UsageError: a file that is no text MonitoringConfig.
    """
    if not flags.monitoring_config_file:
        return None
    path = Path(flags.monitoring_config_file)
    text = _read_text(path, f"--monitoring_config_file={path}")
    whole = text_proto.parse_text_proto(text, source=str(path))
    config = text_proto.values_of(
        whole, {"prometheus_config": text_proto.message}, source=str(path), of="MonitoringConfig"
    )
    if "prometheus_config" not in config:
        return None
    kinds = {"enable": text_proto.boolean, "path": text_proto.string}
    wanted = text_proto.values_of(config["prometheus_config"], kinds, source=str(path), of="PrometheusConfig")
    return (wanted.get("path") or "/monitoring/prometheus/metrics") if wanted.get("enable") else None


def tls_context(flags: ServerFlags) -> ssl.SSLContext | None:
    """Make the TLS context of gRPC from --ssl_config_file (ssl_config.proto); None: not encrypted.

    Raises:
        UsageError: a file that is no text SSLConfig, or whose keys and certificates cannot be used.
    """
    if not flags.ssl_config_file:
        return None
    source = f"--ssl_config_file={flags.ssl_config_file}"
    text = _read_text(Path(flags.ssl_config_file), source)
    texts = dict.fromkeys(("server_key", "server_cert", "custom_ca"), text_proto.string)
    values = text_proto.values_of(
        text_proto.parse_text_proto(text, source=source),
        {**texts, "client_verify": text_proto.boolean},
        source=source,
        of="SSLConfig",
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    with os.fdopen(
        os.memfd_create("tls"), "w"
    ) as pair:  # OpenSSL reads a file, and no disk shall hold the key
        pair.write(f"{values.get('server_key', '')}\n{values.get('server_cert', '')}\n")
        pair.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{pair.fileno()}", password="")
            if values.get("custom_ca"):
                context.load_verify_locations(cadata=values["custom_ca"])
        except (OSError, ValueError) as error:
            raise UsageError(f"{source}: server_key, server_cert or custom_ca: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED if values.get("client_verify") else ssl.CERT_NONE
    return context


def grpc_limits(flags: ServerFlags) -> ServerLimits:
    """Make the limits of gRPC from --grpc_channel_arguments; write a note for each argument without effect.

    Raises:
        UsageError: text other than `key=value,key=value`, or a limit that is no positive number.
    """
    channel_arguments = {
        "grpc.max_concurrent_streams": "max_concurrent_streams",
        "grpc.max_receive_message_length": "max_message_bytes",
        "grpc.max_connection_age_ms": "max_connection_age_ms",
        "grpc.max_connection_age_grace_ms": "max_connection_age_grace_ms",
    }
    limits: dict[str, Any] = {}
    for pair in filter(None, flags.grpc_channel_arguments.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--grpc_channel_arguments: {pair!r}; expected key=value,key=value")
        name = channel_arguments.get(key)
        if name is None:
            note(f"--grpc_channel_arguments: {key} has no effect")
        elif not value.isdecimal() or not 0 < int(value) < 2**31:
            raise UsageError(f"--grpc_channel_arguments: {pair}; expected a positive number")
        else:
            limits[name] = int(value)
    return ServerLimits(**limits)


def _read_text(path: Path, said: str, *, hint: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{said}: {getattr(error, 'strerror', '') or error}", hint=hint) from error
