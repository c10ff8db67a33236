"""A scenario written for a person is YAML that reads back as the same, with comments where they find room."""

from __future__ import annotations

from typing import Any

import yaml

from batchtune.scenario.yaml_document import commented

DOCUMENT: dict[str, Any] = {
    "name": "m",
    "target": {"model": "/models/a b: c", "cpus": [0]},
    "request": {"inputs": {"random": {"by_input": {"ids": {"low": 0, "high": 100, "whole": True}}}}},
    "slo": {"p95": "20ms"},
    "objective": "capacity",
    "search": {"budget": {"time": "90s"}, "space": {"max_batch_size": [1, 2]}},
}
TEXT = """\
# Which?
#
#     batchtune sweep m.yaml

name: m

target:
  # takes x float32 [?, 4], and a second input whose name is so long that there is no room for all of this behind the
  # path
  model: '/models/a b: c'
  cpus: [0]

request:
  inputs: {random: {by_input: {ids: {low: 0, high: 100, whole: true}}}}

slo:
  p95: 20ms                   # 19 of 20
objective: capacity

search:
  budget: {time: 90s}
  space:
    max_batch_size: [1, 2]    # rows
"""


def test_it_is_in_order_two_deep_with_comments_beside_or_above() -> None:
    comments = {
        "slo.p95": "19 of 20",
        "search.space.max_batch_size": "rows",
        "search.space.num_batch_threads": "not there",
        "target.cpus": "",
        "target.model": "takes x float32 [?, 4], and a second input whose name is so long that there is no room for "
        "all of this behind the path",
    }
    text = commented(DOCUMENT, head=["Which?", "", "    batchtune sweep m.yaml"], comments=comments)
    assert yaml.safe_load(text) == DOCUMENT
    assert text == TEXT
