"""Which file does one deploy with what was recommended?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from batchtune.batching.dialects import parameters_file
from batchtune.batching.parameters import Configuration
from batchtune.batching.triton_config import with_batching
from batchtune.batching.triton_pbtxt import format_config_pbtxt, format_triton
from batchtune.tune.answer.recommendation import Recommendation

BATCHING_PARAMETERS: Final = "batching_parameters.txt"
CONFIG_PBTXT: Final = "config.pbtxt"


def parameters_name(configuration: Configuration) -> str:
    """What the file is called in the run, and by the server."""
    return CONFIG_PBTXT if configuration.dialect == "triton" else BATCHING_PARAMETERS


def parameters_text(recommendation: Recommendation, model_config: Mapping[str, Any] | None) -> str:
    """The file for the server that was measured, with a comment that says what is in it."""
    if recommendation.configuration.dialect == "triton":
        return tritons_file(recommendation, model_config)
    return parameters_file(recommendation.configuration).text


def tritons_file(recommendation: Recommendation, model_config: Mapping[str, Any] | None) -> str:
    """The whole config.pbtxt where the run has what the model's configuration was, else only its batching part."""
    configuration = recommendation.configuration
    if model_config is None or configuration.dialect != "triton":
        return format_triton(configuration.batching, rows_per_request=recommendation.rows_per_request)
    config = with_batching(model_config, configuration)
    return f"# batchtune: {configuration.label()}\n{format_config_pbtxt(config)}"
