"""A recommendation of length buckets says what they save of the padding in one queue."""

from __future__ import annotations

from batchtune.batching.parameters import Configuration
from batchtune.report.findings import text_of
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.reason import padding_note
from batchtune.tune.trials.trial import Trial
from tests.tune.tune_fakes import asked, planted

BATCH_8 = {"max_batch_size": 8, "batch_timeout_micros": 1000, "num_batch_threads": 1}
BATCH_14 = {"max_batch_size": 14, "batch_timeout_micros": 2000, "num_batch_threads": 1}


def padded(padding: int, *, bucket: str = "") -> ServerActivity:
    return ServerActivity(
        duration_s=1.0, bucket_sent_elements={bucket: 100}, bucket_padding_elements={bucket: padding}
    )


def run(
    number: int, padding: int, *, buckets: str = "", throughput: float = 100.0, batching=BATCH_8
) -> Trial:
    trial = planted(number, batching=batching, throughput=throughput, p95_s=0.01, server=padded(padding))
    flags = (("length_buckets", buckets),) if buckets else ()
    return asked(trial, configuration=Configuration(batching=trial.configuration.batching, flags=flags))


def note_of(*trials: Trial) -> tuple[str, ...]:
    chosen = trials[0].configuration
    runs = [trial for trial in trials if trial.configuration == chosen]
    return tuple(map(text_of, padding_note(runs, chosen, trials)))


def test_it_is_compared_with_one_queue_of_the_same_parameters():
    trials = run(1, 25, buckets="32,64"), run(2, 100), run(3, 300, throughput=200.0, batching=BATCH_14)
    (note,) = note_of(*trials)
    assert note == (
        "padding saved: 75 %: 20 % of the elements computed are padding, 50 % in one queue with "
        "max_batch_size=8 batch_timeout_micros=1000 num_batch_threads=1"
    )


def test_else_with_the_fastest_single_queue_and_more_padding_is_told_as_such():
    trials = (
        run(1, 60, buckets="32"),
        run(2, 50, batching=BATCH_14),
        run(3, 30, throughput=1.0, batching="defaults"),
    )
    (note,) = note_of(*trials)
    assert note.startswith("padding added: 20 %")
    assert "max_batch_size=14" in note


def test_a_calibration_of_one_queue_will_do():
    calibration = asked(run(2, 100), source="calibration")
    (note,) = note_of(run(1, 25, buckets="32,64"), calibration)
    assert note.startswith("padding saved: 75 %")


def test_without_a_single_queue_to_compare_with_it_says_so_and_without_buckets_nothing():
    (note,) = note_of(run(1, 25, buckets="32"))
    assert (
        note
        == "20 % of the elements computed are padding; what the buckets save is not known: one queue was not measured"
    )
    assert note_of(run(1, 100)) == ()
