"""What is said of several models is what was measured of them."""

from __future__ import annotations

import io
from dataclasses import replace

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.measure.quantiles import Estimate
from batchtune.report.several_models import print_joint
from batchtune.report.words import question_text
from batchtune.tune.answer.recommendation import OpenQuestion
from batchtune.tune.joint.answer import (
    Alone,
    JointRecommendation,
    Latency,
    ModelShare,
    Rival,
)

SHARED = BatchingParameters(num_batch_threads=2)
LARGE, SMALL = (BatchingParameters(max_batch_size=size) for size in (16, 2))
CHOSEN = Configuration(batching=SHARED, models=(("ranker", LARGE), ("reader", SMALL)))
APART = Configuration(batching=SHARED, models=(("ranker", LARGE), ("reader", LARGE)))
RECOMMENDATION = JointRecommendation(
    configuration=CHOSEN,
    objective="capacity",
    score=1.5,
    factor=1.5,
    missed_factor=1.71,
    fresh=4,
    held=3,
    established=True,
    loads=40,
    models=(
        ModelShare(
            name="ranker",
            stated_rps=400.0,
            rate_rps=600.0,
            latencies=(
                Latency(name="p95", limit_s=0.05, measured_s=Estimate(value=0.041, low=0.039, high=0.044)),
            ),
            alone=Alone(configuration=CHOSEN.of_model("ranker"), score=3.0, rate_rps=1200.0, tried=7),
        ),
        ModelShare(
            name="reader",
            stated_rps=60.0,
            rate_rps=90.0,
            latencies=(
                Latency(name="p95", limit_s=0.15, measured_s=Estimate(value=0.12, low=0.12, high=0.12)),
            ),
            alone=None,
        ),
    ),
    rivals=(Rival(configuration=APART, kept=False, factor=1.1, misses=("ranker",)),),
    caveats=("ranker: an emulated device answered",),
)


def told(chosen: JointRecommendation) -> str:
    stream = io.StringIO()
    print_joint(chosen, deployment=["serve it"], stream=stream)
    return " ".join(stream.getvalue().split())


def test_a_capacity_says_what_each_gets_and_what_company_costs() -> None:
    text = told(RECOMMENDATION)
    for words in (
        "Every model met its SLO at ×1.5 of the stated rates, in 3 of 4 confirmation runs; more than ×1.71 is missed. Recommended:",
        "shared: num_batch_threads=2",
        "reader: max_batch_size=2",
        "ranker 600/s p95 50 ms 41 ms (39 ms to 44 ms) 1,200/s",
        (
            "ranker alone held 1,200/s within its SLO (in the search, the best of 7 configurations tried), with max_batch_size=16 num_batch_threads=2: "
            "beside the others it gets 50 % of that."
        ),
        (
            "What was best for each alone, put together on 2 threads, broke the SLO of ranker at ×1.5 (one run); it held ×1.1."
        ),
        "Warning: ranker: an emulated device answered",
        "Deploy: serve it",
    ):
        assert words in text.replace("\N{NO-BREAK SPACE}", " "), words
    assert "not established" not in text
    questions = (OpenQuestion(code="unconfirmed", held=2, missed=2), OpenQuestion(code="wide"))
    near = told(replace(RECOMMENDATION, established=False, open_questions=questions))
    told_of = "; ".join(question_text(question) for question in questions)
    assert f"not established: {told_of}; give the sweep more time (--budget)." in near


def test_a_latency_claims_no_rates_that_were_not_searched() -> None:
    alone = Alone(configuration=CHOSEN.of_model("ranker"), score=4.0, rate_rps=400.0, tried=1)
    models = (replace(RECOMMENDATION.models[0], rate_rps=400.0, alone=alone),)
    latency = replace(
        RECOMMENDATION,
        objective="latency",
        score=1.25,
        factor=1.0,
        missed_factor=None,
        fresh=0,
        held=0,
        established=False,
        open_questions=(OpenQuestion(code="unconfirmed"),),
        models=models,
    )
    text = told(latency).replace("\N{NO-BREAK SPACE}", " ")
    assert "at the stated rates, in the search, and was never measured again" in text
    assert "the tightest limit was used to 80 %" in text
    assert "ranker alone used 25 % of its tightest limit" in text
    assert "held" not in text
    assert "not established" in text
