"""How do sample models become a chain, which the bundled server answers by asking them in turn?"""

from __future__ import annotations

from pathlib import Path

from batchtune.sample_models.sizes import LENGTH, RELEVANT_FROM

_PIPELINES = {
    "trigger_and_select": f"""\
# Reviews that the cheap model finds relevant, a quarter of random ones, are scored by the dear one.
inputs:
  tokens: {{dtype: float32, shape: [{LENGTH}]}}
steps:
  trigger:
    model: trigger
    inputs: {{tokens: request.tokens}}
  select:
    model: selector
    inputs: {{tokens: request.tokens}}
    when: trigger.relevance > {RELEVANT_FROM}
    otherwise: {{scores: 0}}
outputs:
  relevance: {{from: trigger.relevance, dtype: float32, shape: [1]}}
  scores: {{from: select.scores, dtype: float32, shape: [2]}}
""",
}


def write_chain(name: str, version_path: Path) -> None:
    """Write the version directory that the server loads."""
    version_path.mkdir(parents=True)
    (version_path / "pipeline.yaml").write_text(_PIPELINES[name], encoding="utf-8")
