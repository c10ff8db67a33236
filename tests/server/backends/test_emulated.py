"""An emulated device holds a batch for its service time and answers a checkable function of the inputs."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.server.backends.emulated import (
    EmulatedDevice,
    EmulatedServiceTime,
    SharedTimetable,
    load_emulated_model,
)
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError

IO = "inputs: {x: {dtype: float32, shape: [4]}}\noutputs: {y: {dtype: float32, shape: [3]}}\n"
TEXT_IO = "inputs: {s: {dtype: string}}\noutputs: {n: {dtype: int64}, t: {dtype: string, shape: [2]}}\n"
STEPS = ((1, 0, 2.0), (2, 0, 4.0), (8, 0, 4.0), (16, 0, 8.0))
"""Rows, elements and milliseconds: beyond the last step it goes on in proportion."""
Y = (TensorSpec(name="y", dtype="float32", shape=(None, 3)),)


def version_directory(tmp_path: Path, text: str) -> Path:
    (tmp_path / "emulated.yaml").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        (IO, {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}, {"y": [[6, 7, 8], [22, 23, 24]]}),
        (IO, {"x": np.zeros((0, 4), np.float32)}, {"y": np.zeros((0, 3))}),
        (TEXT_IO, {"s": np.array([b"abc", b""], object)}, {"n": [3, 0], "t": [[b"3", b"4"], [b"0", b"1"]]}),
    ],
    ids=["the row's sum plus the column", "no rows", "strings count with their length"],
)
def test_outputs_are_a_function_of_the_inputs(text: str, inputs: Any, outputs: Any, tmp_path: Path) -> None:
    model = load_emulated_model(version_directory(tmp_path, text))
    answered = model.runs["serving_default"](inputs)
    assert list(answered) == list(outputs)
    for spec in model.signatures["serving_default"].outputs:
        np.testing.assert_array_equal(answered[spec.name], outputs[spec.name])
        assert answered[spec.name].dtype == spec.dtype


def test_the_signature_has_a_batch_dimension_and_free_sizes(tmp_path: Path) -> None:
    text = "inputs: {x: {dtype: int32, shape: [-1, 2]}}\noutputs: {y: {dtype: float32, shape: []}}\n"
    signature = load_emulated_model(version_directory(tmp_path, text)).signatures["serving_default"]
    assert signature.inputs == (TensorSpec(name="x", dtype="int32", shape=(None, None, 2)),)
    assert signature.outputs == (TensorSpec(name="y", dtype="float32", shape=(None,)),)


@pytest.mark.parametrize(
    ("service_time", "rows", "elements", "mean_ms"),
    [
        ({"base_ms": 2.0, "per_row_ms": 0.05}, 32, 0, 3.6),
        ({"base_ms": 1.0, "per_row_ms": 0.5, "per_element_ms": 0.25}, 2, 8, 4.0),
        *(({"base_ms": 9.0, "steps": ((1, 2.0), (8, 4.0))}, *one) for one in STEPS),
    ],
)
def test_the_service_time_grows_with_rows_and_elements_or_by_steps(
    service_time: dict[str, Any], rows: int, elements: int, mean_ms: float
) -> None:
    assert EmulatedServiceTime(**service_time).mean_ns(rows, elements) == mean_ms * 1e6


@pytest.mark.parametrize(
    ("held", "least_ns"), [({"base_ms": 2}, 2_000_000), ({"per_element_ms": 0.5}, 4_000_000)]
)
def test_a_batch_is_held_for_its_service_time(held: dict[str, float], least_ns: int, tmp_path: Path) -> None:
    """Padding included: two rows of four."""
    model = load_emulated_model(version_directory(tmp_path, f"service_time: {held}\n{IO}"))
    started_ns = time.monotonic_ns()
    model.runs["serving_default"]({"x": np.ones((2, 4), np.float32)})
    assert time.monotonic_ns() - started_ns >= least_ns


@pytest.mark.parametrize(("concurrency", "serial"), [("serial", True), ("parallel", False)])
def test_a_serial_device_runs_batches_one_after_the_other(concurrency: str, serial: bool) -> None:
    service_time = EmulatedServiceTime(base_ms=20.0, concurrency=concurrency)  # type: ignore[arg-type]
    device = EmulatedDevice(service_time, rows_max=None, outputs=Y)
    arrived_ns = time.monotonic_ns()
    due_ns = [device._due_ns(arrived_ns, 1) - arrived_ns for _ in range(3)]
    assert due_ns == ([20_000_000, 40_000_000, 60_000_000] if serial else [20_000_000] * 3)


def test_batches_at_once_slow_each_other_by_the_contention() -> None:
    timetable = SharedTimetable(0.5)
    first = timetable.start(0, 30)
    assert timetable.next_end_ns() == 30
    second = timetable.start(10, 10)
    # Two at once run at 1/1.5: the second takes 15, and the first has then done 10 + 10 of its 30.
    assert timetable.next_end_ns() == 25
    timetable.advance(25)
    assert (timetable.has_ended(first), timetable.has_ended(second)) == (False, True)
    assert timetable.next_end_ns() == 35


def test_late_looks_at_the_timetable_do_not_add_up() -> None:
    timetable = SharedTimetable(1.0)
    batches = [timetable.start(0, held_ns) for held_ns in (10, 20)]
    timetable.advance(1000)
    assert all(map(timetable.has_ended, batches))
    timetable.start(1000, 10)
    assert timetable.next_end_ns() == 1010


def test_a_shared_device_holds_batches_at_once() -> None:
    law = EmulatedServiceTime(base_ms=4.0, concurrency="parallel", contention_ratio=0.5)
    device = EmulatedDevice(law, rows_max=None, outputs=Y)
    started_ns = time.monotonic_ns()
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(device, [{"x": np.ones((1, 4), np.float32)}] * 2))
    assert time.monotonic_ns() - started_ns >= 4_000_000
    assert [answer["y"].shape for answer in answers] == [(1, 3)] * 2


def test_only_batches_that_do_not_disturb_each_other_make_a_parallel_device(tmp_path: Path) -> None:
    def loaded(service_time: str) -> bool:
        text = f"service_time: {{base_ms: 1, {service_time}}}\n"
        return load_emulated_model(version_directory(tmp_path, text + IO)).parallel

    assert loaded("concurrency: parallel")
    assert not loaded("concurrency: parallel, contention_ratio: 0.5")


def drawn(count: int, seed: int, **service_time: float) -> list[int]:
    law = EmulatedServiceTime(base_ms=1.0, seed=seed, concurrency="parallel", **service_time)  # type: ignore[arg-type]
    device = EmulatedDevice(law, rows_max=None, outputs=Y)
    return [device._due_ns(0, 1) for _ in range(count)]


def test_jitter_keeps_the_mean_and_is_seeded() -> None:
    first = drawn(4000, 1, jitter_ratio=0.2)
    assert first == drawn(4000, 1, jitter_ratio=0.2)
    assert first != drawn(4000, 2, jitter_ratio=0.2)
    # 4000 draws of relative deviation 0.2: the mean is within 5 standard errors, the deviation within 10 %.
    assert np.mean(first) == pytest.approx(1e6, rel=5 * 0.2 / 4000**0.5)
    assert np.std(first) == pytest.approx(0.2e6, rel=0.1)


def test_a_share_of_the_batches_is_slow_and_drawn_with_the_seed() -> None:
    first = drawn(400, 1, slow_ratio=0.25, slow_factor=10.0)
    assert first == drawn(400, 1, slow_ratio=0.25, slow_factor=10.0)
    assert set(first) == {1_000_000, 10_000_000}
    # 400 draws with probability 1/4: within 5 standard errors.
    assert first.count(10_000_000) == pytest.approx(100, abs=5 * 75**0.5)


def test_a_batch_burns_the_cpu_time_that_was_asked_for() -> None:
    device = EmulatedDevice(EmulatedServiceTime(base_ms=1.0, cpu_ms=3.0), rows_max=None, outputs=Y)
    before_ns = time.thread_time_ns()
    device({"x": np.zeros((1, 4), np.float32)})
    assert time.thread_time_ns() - before_ns >= 3_000_000


def test_a_batch_burns_a_share_of_what_the_process_used_since_the_one_before() -> None:
    device = EmulatedDevice(EmulatedServiceTime(cpu_ratio=0.5), rows_max=None, outputs=Y)
    inputs = {"x": np.zeros((1, 4), np.float32)}
    device(inputs)
    used_ns = time.process_time_ns() + 4_000_000
    while time.process_time_ns() < used_ns:
        pass
    before_ns = time.thread_time_ns()
    device(inputs)
    assert time.thread_time_ns() - before_ns >= 2_000_000


def test_more_rows_than_the_memory_holds_fail_as_out_of_memory_does() -> None:
    device = EmulatedDevice(EmulatedServiceTime(), rows_max=2, outputs=Y)
    device({"x": np.zeros((2, 4), np.float32)})
    with pytest.raises(
        StatusError, match=r"^RESOURCE_EXHAUSTED: .*OOM when allocating tensor with shape\[3,4\]"
    ):
        device({"x": np.zeros((3, 4), np.float32)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("service_time: {base_mss: 2}\n" + IO, "service_time.base_mss: unknown key; did you mean 'base_ms'?"),
        ("service_time: {base_ms: -1}\n" + IO, "service_time.base_ms: -1; expected a number ≥ 0"),
        ("service_time: {base_ms: fast}\n" + IO, "service_time.base_ms: 'fast'; expected a number ≥ 0"),
        ("service_time: {concurrency: both}\n" + IO, "expected serial or parallel"),
        (
            "service_time: {contention_ratio: 1}\n" + IO,
            "contention_ratio: read only with concurrency: parallel",
        ),
        ("service_time: {steps: [1]}\n" + IO, "service_time.steps: expected a table"),
        ("service_time: {steps: {0: 1}}\n" + IO, "service_time.steps: 0; expected a whole number ≥ 1"),
        ("service_time: 3\n" + IO, "service_time: 3; expected a table"),
        ("memory: {rows_max: 0}\n" + IO, "memory.rows_max: 0; expected a whole number ≥ 1"),
        ("outputs: {y: {shape: [1]}}\n", "inputs: missing"),
        ("{inputs: {x: {dtype: flot32}}, outputs: {y: {}}}", "x.dtype: 'flot32'; did you mean 'float32'?"),
        ("{inputs: {x: {}}, outputs: {y: {shape: [-1]}}}", "outputs.y.shape: -1; expected a whole number"),
        ("[1, 2]\n", "the file: [1, 2]; expected a table"),
        ("{", "not YAML: "),
    ],
)
def test_a_fault_in_the_file_is_named_by_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(StatusError) as raised:
        load_emulated_model(version_directory(tmp_path, text))
    assert raised.value.code == "INVALID_ARGUMENT"
    assert re.match(rf"{tmp_path / 'emulated.yaml'}:[12]: ", raised.value.message)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("other.yaml", "NOT_FOUND", "none of saved_model"),
        ("pipeline.yaml", "UNIMPLEMENTED", "chains of models no longer exist"),
    ],
)
def test_the_file_in_a_folder_decides_the_backend(file: str, code: str, said: str, tmp_path: Path) -> None:
    path = version_directory(tmp_path, IO) / "emulated.yaml"
    assert load_model(tmp_path, ServerFlags()).emulated
    path.rename(tmp_path / file)
    with pytest.raises(StatusError, match=said) as raised:
        load_model(tmp_path, ServerFlags(device="cpu"))
    assert raised.value.code == code
