"""Two readings of a server's metrics page become what happened between them."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from batchtune.measure.measurement import padding_per_element
from batchtune.plain_values import from_plain, to_plain
from batchtune.report.comparison import bucket_text
from batchtune.target.telemetry import Counters, ServerActivity, activity, parse_prometheus

# The form of a tensorflow_model_server page: only TYPE lines, colons in names, {} without labels.
TF_SERVING = """# TYPE :tensorflow:serving:batching_session:queuing_latency histogram
:tensorflow:serving:batching_session:queuing_latency_bucket{{thread_pool_name="",le="100"}} {waits}
:tensorflow:serving:batching_session:queuing_latency_bucket{{thread_pool_name="",le="+Inf"}} {waits}
:tensorflow:serving:batching_session:queuing_latency_sum{{thread_pool_name=""}} {wait_micros}
:tensorflow:serving:batching_session:queuing_latency_count{{thread_pool_name=""}} {waits}
# TYPE :tensorflow:serving:batching_session:wrapped_run_count counter
:tensorflow:serving:batching_session:wrapped_run_count{{}} {batches}
# TYPE :tensorflow:serving:batching_session:processed_batch_size histogram
:tensorflow:serving:batching_session:processed_batch_size_bucket{{le="4"}} 0
:tensorflow:serving:batching_session:processed_batch_size_bucket{{le="8"}} {small}
:tensorflow:serving:batching_session:processed_batch_size_bucket{{le="16"}} {batches}
:tensorflow:serving:batching_session:processed_batch_size_bucket{{le="+Inf"}} {batches}
:tensorflow:serving:batching_session:processed_batch_size_sum{{}} {rows}
:tensorflow:serving:batching_session:processed_batch_size_count{{}} {batches}
:tensorflow:serving:batching_session:padding_size_sum{{execution_batch_size="4"}} 0
:tensorflow:serving:batching_session:padding_size_count{{execution_batch_size="4"}} {small}
:tensorflow:serving:batching_session:padding_size_sum{{execution_batch_size="8"}} {padding}
:tensorflow:serving:batching_session:padding_size_count{{execution_batch_size="8"}} {large}
:tensorflow:serving:request_count{{model_name="m",status="OK"}} {waits}
:tensorflow:serving:request_count{{model_name="m",status="UNAVAILABLE"}} {refused}
"""


def reading(at_s: float, cpu_s: float | None = None, **values: float) -> Counters:
    """A page of batches of 4 rows (`small`) and of 8; in its histogram a value equal to a bound lies above it."""
    zeros = dict.fromkeys(("waits", "wait_micros", "batches", "small", "rows", "padding", "refused"), 0.0)
    page = zeros | values
    page["large"] = page["batches"] - page["small"]
    return Counters(monotonic_s=at_s, server_cpu_s=cpu_s, series=parse_prometheus(TF_SERVING.format(**page)))


def read(page: str, at_s: float = 1.0) -> Counters:
    return Counters(monotonic_s=at_s, server_cpu_s=None, series=parse_prometheus(page))


NOTHING = Counters(monotonic_s=0.0, server_cpu_s=None)


def read_back(seen: ServerActivity) -> ServerActivity:
    return from_plain(ServerActivity, json.loads(json.dumps(to_plain(seen))))


def test_differences_of_a_real_tensorflow_serving_page() -> None:
    before = reading(10.0, 1.0, waits=5, wait_micros=100, batches=1, small=1, rows=4)
    after = reading(
        12.0, 2.5, waits=105, wait_micros=50_100, batches=21, small=11, rows=124, padding=20, refused=7
    )
    seen = activity(before, after)
    assert seen.duration_s == 2.0
    assert (seen.batches, seen.rows) == (20, 120)
    assert seen.mean_batch_rows == (120 - 20) / 20
    assert seen.padding_ratio == 20 / 120
    assert seen.queue_wait_mean_s == 50_000 / 100 / 1e6
    assert seen.batches_by_rows == {4: 10, 8: 10}
    assert seen.requests_by_status == {"OK": 100, "UNAVAILABLE": 7}
    assert seen.server_cpu_s == 1.5
    assert seen.execution_s_by_rows == {}
    assert not seen.emulated


def test_our_own_metrics_tell_execution_time_per_size_and_why_batches_closed() -> None:
    page = """:batchtune:serving:batch_close_count{reason="full"} 30
:batchtune:serving:batch_close_count{reason="timeout"} 10
:batchtune:serving:batch_execution_count{batch_size="8"} 40
:batchtune:serving:batch_execution_micros_total{batch_size="8"} 96000
:batchtune:serving:device_busy_micros_total{} 96000
:batchtune:serving:rejected_count{reason="queue_full"} 3
:batchtune:serving:event_loop_lag_bucket{le="100"} 95
:batchtune:serving:event_loop_lag_bucket{le="1000"} 100
:batchtune:serving:event_loop_lag_bucket{le="+Inf"} 100
:batchtune:serving:emulated_device{} 1
:batchtune:serving:emulated_device_parallel{} 1
"""
    seen = activity(NOTHING, read(page))
    assert seen.close_reasons == {"full": 30, "timeout": 10}
    assert seen.batches_by_rows == {8: 40}
    assert seen.execution_s_by_rows == {8: 0.0024}
    assert seen.rejected == {"queue_full": 3}
    assert seen.device_busy_ratio == 0.096
    assert seen.event_loop_lag_p99_s == 0.0001  # more than the lower edge of its bucket
    assert seen.emulated
    assert seen.device_parallel


def test_the_busiest_gpu_is_told() -> None:
    page = """:batchtune:serving:gpu_busy_micros_total{gpu="0"} %d
:batchtune:serving:gpu_busy_micros_total{gpu="1"} %d
:batchtune:serving:gpu_memory_used_bytes{gpu="0"} 1000
:batchtune:serving:gpu_memory_used_bytes{gpu="1"} 2000
"""
    before, after = read(page % (10, 50)), read(page % (10, 1_800_050), at_s=3.0)
    seen = activity(before, after)
    assert (seen.gpu_busy_ratio, seen.gpu_memory_used_bytes) == (0.9, 2000)
    assert activity(before, before).gpu_busy_ratio == 0.0
    assert read_back(seen) == seen


def test_activity_of_an_older_ledger_is_still_read() -> None:
    older = to_plain(activity(reading(0.0), reading(1.0)))
    for name in ("gpu_busy_ratio", "gpu_memory_used_bytes", "device_parallel"):
        del older[name]
    assert from_plain(ServerActivity, older).gpu_busy_ratio is None


def test_counters_that_fell_are_no_account_of_one_server() -> None:
    """Of another behind the same balancer one counter may be higher, another lower."""
    seen = activity(reading(0.0, 1.0, batches=500, rows=900), reading(1.0, 2.5, batches=20, rows=4_000))
    assert read_back(seen) == seen == ServerActivity(duration_s=1.0, went_back=True, server_cpu_s=1.5)


def test_a_process_that_started_at_another_time_is_another_server() -> None:
    before, after = (read(f"process_start_time_seconds {started_s}\n") for started_s in (5e8, 6e8))
    assert activity(before, after).went_back
    assert not activity(before, before).went_back
    assert not activity(before, replace(NOTHING, monotonic_s=2.0)).went_back


def test_a_server_that_tells_nothing_gives_nothing() -> None:
    seen = activity(NOTHING, replace(NOTHING, monotonic_s=1.0))
    assert (seen.mean_batch_rows, seen.queue_wait_mean_s, seen.event_loop_lag_p99_s) == (None, None, None)


@given(st.text())
@example("rows 1.2.3")
def test_any_page_at_all_is_read_without_failing(page: str) -> None:
    parse_prometheus(page)


def test_padding_is_told_by_length_bucket() -> None:
    page = """:batchtune:serving:length_bucket_rows_total{{bucket="32"}} {rows}
:batchtune:serving:length_bucket_sent_elements_total{{bucket="32"}} {sent}
:batchtune:serving:length_bucket_sent_elements_total{{bucket=">32"}} 50
:batchtune:serving:length_bucket_batches_total{{bucket="32"}} {rows}
:batchtune:serving:length_bucket_execution_micros_total{{bucket="32"}} {sent}.4
:batchtune:serving:length_bucket_padding_elements_total{{bucket="32"}} {padding}
"""
    before = read(page.format(rows=1, sent=9, padding=1))
    after = read(page.format(rows=5, sent=109, padding=26), at_s=2.0)
    moved = activity(before, after)
    assert moved.bucket_rows == moved.bucket_batches == {"32": 4}
    assert moved.bucket_execution_micros == {"32": 100}
    assert moved.bucket_sent_elements == {"32": 100}
    assert padding_per_element([moved, None]) == 0.25
    assert bucket_text(moved) == "length padding: 20 % of the elements computed (bucket 32: 20 %)"
    assert read_back(moved) == moved
    assert padding_per_element([activity(before, before)]) is None
    assert bucket_text(activity(before, before)) == ""


def test_batches_are_told_by_model() -> None:
    page = """:batchtune:serving:model_batches_total{{model_name="m"}} {batches}
:batchtune:serving:model_batch_micros_total{{model_name="m"}} {micros}
"""
    before = read(page.format(batches=1, micros=10.5))
    moved = activity(before, read(page.format(batches=5, micros=110.5), at_s=2.0))
    assert (moved.model_batches, moved.model_batch_micros) == ({"m": 4}, {"m": 100})
