"""The command line is tensorflow_model_server's; what it cannot mean is refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.server import startup
from batchtune.server.__main__ import main
from batchtune.server.server_flags import ServerFlags, help_text, parse_flags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.system import is_loopback
from batchtune.wire.grpc.server_writer import ServerLimits

BASE = "--model_base_path=/m"


def flags_of(*arguments: str) -> ServerFlags:
    return parse_flags([BASE, *arguments])[1]


def test_values_may_follow_an_equals_sign_or_a_space() -> None:
    flags = flags_of("--port=9000", "--model_name", "m")
    assert (flags.port, flags.model_name) == (9000, "m")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("--enable_batching", True),
        ("--enable_batching=true", True),
        ("--enable_batching=0", False),
        ("--enable_batching false", False),
        ("--enable-batching --model_name=m", True),
        ("--enable_batching --enable_batching=false", False),
    ],
)
def test_switches_take_a_value_or_none(arguments: str, value: bool) -> None:
    assert flags_of(*arguments.split()).enable_batching is value


def test_defaults_are_the_reference_s_but_for_the_address() -> None:
    expected = {"port": 8500, "rest_api_port": 0, "rest_api_timeout_in_ms": 30000, "model_name": "default"}
    expected |= {"file_system_poll_wait_seconds": 1, "max_num_load_retries": 5, "enable_batching": False}
    expected |= {"enable_model_warmup": True, "saved_model_tags": "serve", "host": "127.0.0.1"}
    flags = flags_of()
    assert {name: getattr(flags, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "noted"),
    [
        ("--grpc_max_threads=64 --enable_profiler=false", ["--grpc_max_threads", "--enable_profiler"]),
        ("--length_buckets=32", ["--length_buckets"]),
    ],
)
def test_a_flag_without_effect_is_accepted_with_a_note(arguments: str, noted: list[str]) -> None:
    _, _, notes = parse_flags([BASE, *arguments.split()])
    assert [note.partition(" has no effect")[0] for note in notes] == [f"note: {name}" for name in noted]


NEVER_BOTH = "--tensorflow_session_parallelism=1 --tensorflow_intra_op_parallelism=1"
UNENABLED = (
    "server_options.batching_parameters_file is set without setting server_options.enable_batching to true."
)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("--prot=1", "unknown argument: --prot=1", "did you mean --port?"),
        ("--max_batch_size=32", "unknown argument: --max_batch_size=32", "--batching_parameters_file=FILE"),
        ("serve", "unknown argument: serve", "flags begin with --"),
        ("--xyzzy", "unknown argument: --xyzzy", "see --help"),
        ("--port=http", "--port=http: expected a whole number", ""),
        ("--port=-1", "--port=-1: expected 0 or more", ""),
        ("--file_system_poll_wait_seconds=99999999999", "99999999999: expected 2147483647 or less", ""),
        (f"--load_retry_interval_micros={10**18}", f"{10**18}: expected 9007199254740992 or less", ""),
        ("--per_process_gpu_memory_fraction=nan", "nan: expected 2147483647 or less", ""),
        ("--model_name=", "--model_name=: a model needs a name", ""),
        ("--port=70000", "--port=70000: expected a port, 0 to 65535", ""),
        ("--port", "--port: a value is missing", "--port=VALUE"),
        ("--enable_batching=maybe", "--enable_batching=maybe: expected true or false", ""),
        ("--batch_scheduler=fifo", "--batch_scheduler=fifo: expected shared, streaming", ""),
        (
            "--batch_scheduler=adaptive",
            "adaptive: expected shared, streaming",
            "no longer exists: take shared",
        ),
        ("--rest_api_port=8500", "--port and --rest_api_port must differ", "give each its own port"),
        ("--port=0", "--port and --rest_api_port are both 0", "give each its own port"),
        ("--use_alts_credentials", "this server does not speak ALTS", "give --ssl_config_file"),
        ("--threads_per_process=2", "--processes_per_replica and --threads_per_process go together", ""),
        ("--enable_tuning_api --host=0.0.0.0", "--enable_tuning_api is for loopback only", "bind 127.0.0.1"),
        ("--enable_per_model_batching_parameters", "needs --enable_batching", ""),
        ("--batching_parameters_file=f", UNENABLED, "add --enable_batching"),
        (NEVER_BOTH, "--tensorflow_session_parallelism sets both", "give either"),
        ("--device=gpu", "expected auto, cpu, cuda or cuda:N", ""),
        ("--device=cuda:x", "expected auto, cpu, cuda or cuda:N", ""),
        ("--torch_dtype=half", "expected as_exported, float32, float16, bfloat16", ""),
        ("--model_base_path=", "are empty!", ""),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_hint(arguments: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_flags([BASE, *arguments.split()])
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_channel_arguments_are_limits_or_noted(capsys: pytest.CaptureFixture[str]) -> None:
    def limits_of(given: str) -> ServerLimits:
        return startup.grpc_limits(flags_of(f"--grpc_channel_arguments={given}"))

    limits = limits_of(
        "grpc.max_concurrent_streams=7,grpc.max_connection_age_ms=60000,grpc.keepalive_time_ms=1"
    )
    assert (limits.max_concurrent_streams, limits.max_connection_age_ms) == (7, 60_000)
    assert "grpc.keepalive_time_ms has no effect" in capsys.readouterr().err
    for wrong in ("concurrent_streams", "concurrent_streams=0", "connection_age_ms=x"):
        with pytest.raises(UsageError, match=r"--grpc_channel_arguments: .*expected"):
            limits_of(f"grpc.max_{wrong}")


def test_a_home_that_is_nobody_s_is_told() -> None:
    flags = parse_flags(["--model_base_path=~no_such_user/m"])[1]
    with pytest.raises(UsageError, match=r"--model_base_path=~no_such_user/m: .*home directory"):
        startup.configured_models(flags)


def test_help_and_version_need_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == help_text()
    assert "--batching_parameters_file" in shown
    assert "--batch_scheduler=shared" in shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("batchtune-model-server ")


def test_a_wrong_flag_ends_with_exit_code_2_and_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([BASE, "--enable_bathing"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown argument: --enable_bathing\nhint: did you mean --enable_batching?\n"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "example.org"])
def test_loopback_is_an_address_or_localhost(host: str) -> None:
    assert is_loopback(host) is (host in {"127.0.0.1", "::1", "localhost"})


def batching_settings(tmp_path: Path, text: str, *flags: str) -> BatchingSettings:
    """Of a server that batches as a file says."""
    (tmp_path / "batching_parameters.txt").write_text(text)
    file = f"--batching_parameters_file={tmp_path / 'batching_parameters.txt'}"
    return startup.batching_settings(flags_of("--enable_batching", file, *flags))


def test_the_batching_file_is_read_and_checked(tmp_path: Path) -> None:
    text = "max_batch_size { value: 8 }\nallowed_batch_sizes: [2, 8]\n"
    settings = batching_settings(tmp_path, text, "--batch_scheduler=streaming")
    assert (settings.enabled, settings.scheduler) == (True, "streaming")
    assert settings.parameters == BatchingParameters(max_batch_size=8, allowed_batch_sizes=(2, 8))


UNMATCHED = "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_size { value: 8 }\nallowed_batch_sizes: 4", UNMATCHED),
        ("num_batch_threads { value: 0 }", "num_batch_threads must be positive; was 0"),
        ("batch_timeout_micros { value: -1 }", "batch_timeout_micros must be non-negative; was -1"),
        ("max_batch_size: 8", "max_batch_size is a wrapper message"),
    ],
)
def test_a_bad_batching_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BatchingParametersError, match=said):
        batching_settings(tmp_path, text)


def test_more_threads_than_a_system_has_are_refused_before_any_starts(tmp_path: Path) -> None:
    said = r"batching_parameters.txt: num_batch_threads must be at most 4096; was 4097"
    with pytest.raises(UsageError, match=said):
        batching_settings(tmp_path, "num_batch_threads { value: 4097 }")
    with pytest.raises(UsageError, match="--processes_per_replica: num_batch_threads must be at most 4096"):
        batching_settings(tmp_path, "", "--processes_per_replica=4097", "--threads_per_process=1")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_model_runs_where_the_device_flag_says(device: str) -> None:
    options = flags_of(f"--device={device}", "--torch_dtype=bfloat16")
    assert (options.device, options.torch_dtype) == (device, "bfloat16")
    assert options.wants_cuda == device.startswith("cuda")
    assert options.cuda_index == int(device.partition(":")[2] or 0)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("prometheus_config { enable: true }", "/monitoring/prometheus/metrics"),
        ('prometheus_config { enable: true, path: "/metrics" }', "/metrics"),
        ("prometheus_config { enable: false }", None),
        ("", None),
    ],
)
def test_the_monitoring_file_says_where_metrics_are(tmp_path: Path, text: str, path: str | None) -> None:
    file = tmp_path / "monitoring.txt"
    file.write_text(text)
    flags = flags_of(f"--monitoring_config_file={file}")
    assert startup.monitoring_path(flags) == path
    file.write_text("prometheus_config {\n  enabled: true\n}")
    with pytest.raises(UsageError, match=r"monitoring\.txt:2: unknown field 'enabled'"):
        startup.monitoring_path(flags)


def test_cortex_limits_threads_and_refuses_a_batch_that_cannot_fill(tmp_path: Path) -> None:
    cortex = ("--processes_per_replica=2", "--threads_per_process=4")
    settings = batching_settings(tmp_path, "max_batch_size { value: 8 }", *cortex)
    assert settings.num_batch_threads == 2
    assert startup.concurrency_limit(flags_of(*cortex), settings) is not None
    settings = batching_settings(tmp_path, "max_batch_size { value: 9 }", *cortex)
    with pytest.raises(UsageError, match=r"max_batch_size \(9\) must be less than or equal to"):
        startup.concurrency_limit(flags_of(*cortex), settings)


def test_session_parallelism_sets_both_kinds_of_threads() -> None:
    flags = flags_of("--tensorflow_session_parallelism=3")
    assert (flags.intra_op_threads, flags.inter_op_threads) == (3, 3)


def test_length_buckets_rise_and_mean_nothing_without_batching(tmp_path: Path) -> None:
    assert batching_settings(tmp_path, "", "--length_buckets=32,64").length_buckets == (32, 64)
    assert batching_settings(tmp_path, "", "--length_buckets=auto").length_buckets == "auto"
    assert startup.batching_settings(flags_of()).length_buckets == ()
    said = r"length_buckets entries must be .* increasing; was 64,32"
    with pytest.raises(BatchingParametersError, match=said):
        batching_settings(tmp_path, "", "--length_buckets=64,32")
