"""A recommendation of length buckets says what they save of the padding in one queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchtune.report.findings import text_of
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.reason import padding_note
from batchtune.tune.trials.trial import Trial
from tests.tune.answer.ledgers import BATCH_8, BATCH_14
from tests.tune.tune_fakes import asked, planted


def run(
    number: int, padding: int, *, buckets: str = "", throughput: float = 100.0, batching=BATCH_8
) -> Trial:
    server = ServerActivity(
        duration_s=1.0, bucket_sent_elements={"": 100}, bucket_padding_elements={"": padding}
    )
    trial = planted(number, batching=batching, throughput=throughput, p95_s=0.01, server=server)
    flags = (("length_buckets", buckets),) if buckets else ()
    return asked(trial, configuration=replace(trial.configuration, flags=flags))


def note_of(*trials: Trial) -> tuple[str, ...]:
    chosen = trials[0].configuration
    runs = [trial for trial in trials if trial.configuration == chosen]
    return tuple(map(text_of, padding_note(runs, chosen, trials)))


ONE_QUEUE = run(2, 100)
SHARE = "20 % of the elements computed are padding"
IN_ONE = "50 % in one queue with max_batch_size=8 batch_timeout_micros=1000 num_batch_threads=1"


@pytest.mark.parametrize(
    ("others", "padding", "said"),
    [
        (
            [ONE_QUEUE, run(3, 300, throughput=200.0, batching=BATCH_14)],
            25,
            f"saved: 75 %: {SHARE}, {IN_ONE}",
        ),
        (
            [run(2, 50, batching=BATCH_14), run(3, 30, throughput=1.0, batching="defaults")],
            60,
            "added: 20 %: 37.5 % of the elements computed are padding, 33.3 % in one queue with max_batch_size=14 ",
        ),
        ([asked(ONE_QUEUE, source="calibration")], 25, "saved: 75 %: "),
    ],
    ids=["the same parameters in one queue", "else the fastest", "a calibration will do"],
)
def test_buckets_are_compared_with_one_queue(others, padding, said):
    (note,) = note_of(run(1, padding, buckets="32,64"), *others)
    assert note.startswith(f"padding {said}")


def test_without_a_single_queue_to_compare_with_it_says_so_and_without_buckets_nothing():
    (note,) = note_of(run(1, 25, buckets="32"))
    assert note == f"{SHARE}; what the buckets save is not known: one queue was not measured"
    assert note_of(ONE_QUEUE) == ()
