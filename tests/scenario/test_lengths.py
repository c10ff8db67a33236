"""Payloads get lengths that together are the distribution that was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.payloads import draw_lengths
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.workload import DISTINCT_LENGTHS, LengthsSpec
from batchtune.tune.search.contenders import Space, lies_inside
from tests.scenario.test_payloads import arrays_in, build, request, signature
from tests.scenario.test_reader import SMALL, changed

LOGNORMAL = {"lognormal": {"median": 40, "sigma": 0.7, "max": 256}}


def drawn(count: int = 200, seed: int = 1, **spec: Any) -> list[int]:
    lengths = draw_lengths(LengthsSpec.model_validate(spec), count, np.random.default_rng(seed))
    return [int(length) for length in lengths]


def test_a_lognormal_has_its_median_and_its_longest() -> None:
    """One length of each of 200 equal shares: the quantiles are those of the distribution, for any seed."""
    for seed in range(5):
        lengths = sorted(drawn(seed=seed, **LOGNORMAL))
        assert 38 <= lengths[100] <= 42
        assert 40 * np.exp(0.7) * 0.9 <= lengths[168] <= 40 * np.exp(0.7) * 1.1  # one standard deviation up
        assert lengths[0] >= 1
        assert lengths[-1] <= 256
    assert max(drawn(lognormal={"median": 200, "sigma": 1, "max": 256})) == 256


def test_a_histogram_gives_each_length_its_weight() -> None:
    counts = Counter(drawn(100, histogram={"lengths": [8, 64, 32], "weights": [3, 1, 1]}))
    assert counts == {8: 60, 64: 20, 32: 20}


def test_recorded_lengths_come_as_often_as_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("# tokens\n5\n\n5 # again\n9\n12\n")
    assert Counter(drawn(40, file=str(tmp_path / "lengths.txt"))) == {5: 20, 9: 10, 12: 10}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\n-1\n", r"lengths.txt:2: expected a length, a whole number above 0; was '-1'"),
        ("5.5\n", r"lengths.txt:1: expected a length"),
        ("0\n", "lengths.txt:1: expected a length"),
        ("9" * 200, "lengths.txt:1: expected a length"),
        ("# nothing\n", "lengths.txt contains no lengths"),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ScenarioError, match=words):
        drawn(file=str(tmp_path / "lengths.txt"))


def test_a_file_that_is_no_text_is_named_with_what_belongs_in_it(tmp_path: Path) -> None:
    (tmp_path / "lengths.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(
        ScenarioError, match=r"^request.lengths.file: .*/lengths.npy is not a text$"
    ) as caught:
        drawn(file=str(tmp_path / "lengths.npy"))
    assert caught.value.hint == "write one length a line"


def test_the_same_seed_draws_the_same_lengths_in_an_order_of_its_own() -> None:
    assert drawn(seed=3, **LOGNORMAL) == drawn(seed=3, **LOGNORMAL)
    assert drawn(seed=3, **LOGNORMAL) != drawn(seed=4, **LOGNORMAL)
    assert drawn(seed=3, **LOGNORMAL) != sorted(drawn(seed=3, **LOGNORMAL))


def test_each_request_has_one_length_in_every_open_dimension() -> None:
    called = signature(("ids", "int32", (None, None)), ("mask", "int32", (None, None, 2)))
    requests = build(request(rows=2, lengths=LOGNORMAL), called)
    assert len(requests.bodies) == DISTINCT_LENGTHS
    shapes = [(one["ids"].shape, one["mask"].shape) for one in map(arrays_in, requests.bodies)]
    assert all(ids == (2, mask[1]) and mask == (2, ids[1], 2) for ids, mask in shapes)
    assert len({ids for ids, _ in shapes}) > 50


def test_shapes_that_are_given_stay_and_zeros_have_lengths_too() -> None:
    called = signature(("ids", "int32", (None, None)), ("image", "float32", (None, None)))
    spec = request(lengths={"histogram": {"lengths": [3, 5], "weights": [1, 1]}}, shapes={"image": [7]})
    arrays = [arrays_in(body) for body in build(spec, called, distinct=4).bodies]
    assert {one["image"].shape for one in arrays} == {(1, 7)}
    assert Counter(one["ids"].shape[1] for one in arrays) == {3: 2, 5: 2}
    zeros = request(lengths=LOGNORMAL, inputs="zeros", distinct=8)
    assert len({arrays_in(body)["ids"].shape for body in build(zeros, IDS).bodies}) == 8


IDS = signature(("ids", "int32", (None, None)))


def test_a_mix_has_kinds_of_different_lengths() -> None:
    short, long = ({"histogram": {"lengths": [length], "weights": [1]}} for length in (4, 64))
    spec = request(lengths=short, mix=[{"weight": 1}, {"weight": 1, "lengths": long}], distinct=2)
    lengths = [arrays_in(body)["ids"].shape[1] for body in build(spec, IDS).bodies]
    assert lengths == [4, 4, 64, 64]


def test_a_model_of_one_length_takes_no_lengths() -> None:
    with pytest.raises(UsageError, match="no input of signature 'serving_default' has an open length"):
        build(request(lengths=LOGNORMAL), signature(("x", "float32", (None, 4))))


WITH_LENGTHS = changed(SMALL, ("load:", "request: {lengths: LENGTHS}\nload:"))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("{}", "request.lengths: expected one of lognormal, histogram, file and constant; was none of them"),
        ("{lognormal: {median: 4, sigma: 1, max: 9}, file: x}", "request.lengths"),
        ("{lognormal: {median: 0, sigma: 1, max: 9}}", "request.lengths.lognormal.median"),
        ("{lognormal: {median: 4, sigma: 1}}", "request.lengths.lognormal.max: missing"),
        (
            "{histogram: {lengths: [4, 5], weights: [1]}}",
            "expected a weight for each of the 2 lengths; was 1",
        ),
        ("{histogram: {lengths: [0], weights: [1]}}", "request.lengths.histogram.lengths.0"),
        ("{file: nothing.txt}", "request.lengths.file: no such file"),
        ("{uniform: {low: 1}}", "request.lengths.uniform: unknown key"),
    ],
)
def test_a_mistake_is_told_with_its_key(lengths: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(WITH_LENGTHS.replace("LENGTHS", lengths))
    assert words in caught.value.message


LOGNORMAL_TEXT = "{lognormal: {median: 4, sigma: 1, max: 9}}"


def with_request(text: str, folder: Path) -> Scenario:
    """Beside recorded requests in r.npz."""
    (folder / "r.npz").touch()
    request = f"request: {text.replace('LENGTHS', LOGNORMAL_TEXT)}\nload:"
    return parse_scenario(changed(SMALL, ("load:", request)), directory=folder)


def test_a_part_of_recorded_requests_inherits_no_lengths(tmp_path: Path) -> None:
    scenario = with_request("{lengths: LENGTHS, mix: [{inputs: {file: r.npz}}, {rows: 2}]}", tmp_path)
    assert [one.lengths is None for one in scenario.request.kinds()] == [True, False]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{lengths: LENGTHS, inputs: {file: r.npz}}", "lengths"),
        ("{mix: [{inputs: zeros}, {inputs: {file: r.npz}, lengths: LENGTHS}]}", "mix.1.lengths"),
        ("{mix: [{inputs: zeros}, {lengths: LENGTHS}], inputs: {file: r.npz}}", "mix.1.lengths"),
    ],
)
def test_lengths_of_recorded_requests_are_refused_by_their_own_key(
    tmp_path: Path, text: str, key: str
) -> None:
    with pytest.raises(ScenarioError, match=f"request.{key}: recorded requests have their own lengths"):
        with_request(text, tmp_path)


def test_a_scenario_with_lengths_reads_back_as_it_was_written(tmp_path: Path) -> None:
    scenario = with_request("{lengths: LENGTHS}", tmp_path)
    assert scenario.request.distinct == DISTINCT_LENGTHS
    assert parse_scenario(format_scenario(scenario)) == scenario


SEARCHED = changed(
    SMALL, ("    max_batch_size:", "    length_buckets: [none, [32, 64], 128, auto]\n    max_batch_size:")
)


def test_buckets_are_searched_and_none_means_what_the_server_does_without() -> None:
    scenario = parse_scenario(SEARCHED)
    values = {"none": (), (32, 64): ("32,64",), 128: ("128",), "auto": ("auto",)}
    for value, flags in values.items():
        point = {"max_batch_size": 4, "length_buckets": value}
        found = scenario.configuration(point)
        assert found.flags == tuple(("length_buckets", text) for text in flags)
        assert Space(scenario).locate(found) == point
        assert lies_inside(found, scenario)
    assert not lies_inside(replace(found, flags=(("length_buckets", "7"),)), scenario)
    off = scenario.configuration({"enable_batching": False, "length_buckets": (32, 64)})
    assert off == Configuration(batching=None)


MODEL = "{model: imdb_transformer}"
FLAGGED = "{model: imdb_transformer, flags: {length_buckets: '16'}}"
FIXED = changed(SMALL, ("load:", "fixed: {length_buckets: none}\nload:"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SEARCHED.replace("[32, 64]", "[64, 32]"), "search.space.length_buckets"),
        (SEARCHED.replace("[32, 64]", "automatic"), "search.space.length_buckets"),
        (SEARCHED.replace("[32, 64]", "[]"), "search.space.length_buckets: length_buckets must be a list of"),
        (
            FIXED.replace("none", "[]"),
            "fixed.length_buckets: length_buckets must be a list of rising lengths",
        ),
        (FIXED.replace("none", "''"), "rising lengths, auto or none; is empty"),
        (SEARCHED.replace("length_buckets", "length_bucket"), "search.space.length_bucket: unknown batching"),
        (SEARCHED.replace(MODEL, "{model: m, server: local}"), "only the bundled server groups requests"),
        (SEARCHED.replace(MODEL, FLAGGED), "target.flags.length_buckets: length_buckets is searched too"),
        (FIXED.replace(MODEL, FLAGGED), "target.flags.length_buckets: length_buckets is fixed too"),
    ],
)
def test_buckets_that_no_server_would_take_are_refused_by_the_scenario(text: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text)
    assert words in caught.value.message
