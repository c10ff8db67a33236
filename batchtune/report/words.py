"""In which words does every text tell the same things: protocols, parameters, reference points, how sure one is?"""

from __future__ import annotations

from typing import Final

from batchtune.batching.parameters import Configuration, to_dict
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.prediction import Reference
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.report.units import number
from batchtune.scenario.units import percentage

PROTOCOLS: Final = {
    "grpc": "gRPC",
    "rest": "REST",
    "kserve_grpc": "KServe gRPC",
    "kserve_rest": "KServe REST",
    "kserve_rest_binary": "KServe REST with binary tensors",
}
REFERENCES: Final = {"no_batching": "no batching", "defaults": "server defaults"}
"""At the head of a column or a line."""
REFERENCES_IN_SENTENCES: Final = {"no_batching": "no batching", "defaults": "the server's defaults"}


def parameters_of(configuration: Configuration) -> list[tuple[str, str]]:
    """Name and value of each parameter that is set, flags too, in the order of the file."""
    batching = {} if configuration.batching is None else to_dict(configuration.batching)
    named = [
        (
            configuration.word(name),
            ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value),
        )
        for name, value in batching.items()
    ]
    return named + [(configuration.flag_word(name), value) for name, value in configuration.flags]


def name_without_parameters(configuration: Configuration) -> str | None:
    """What a configuration is called that sets no batching parameter; None: it sets some."""
    if configuration.batching is None:
        return REFERENCES_IN_SENTENCES["no_batching"]
    return None if to_dict(configuration.batching) else REFERENCES_IN_SENTENCES["defaults"]


def other_references(chosen: Recommendation) -> list[Reference]:
    """The reference points that are not themselves recommended."""
    return [reference for reference in chosen.references if reference.configuration != chosen.configuration]


def gains_of(chosen: Recommendation) -> dict[str, Estimate | None]:
    """How many times better than each reference point it is, by the point's name."""
    return {"no_batching": chosen.gain_over_no_batching, "defaults": chosen.gain_over_defaults}


def likeness_of(chosen: Recommendation) -> tuple[str, str] | None:
    """The words that follow what is recommended, and the mark before them, where a reference point is about as good.

    `: ` where it is that reference point itself, `, ` where it is another configuration; None: it is told from both.
    """
    near = chosen.little_better_than or chosen.indistinct_from
    if near is None:
        return None
    name, known = REFERENCES_IN_SENTENCES[near], chosen.little_better_than is not None
    if any(
        reference.name == near and reference.configuration == chosen.configuration
        for reference in chosen.references
    ):
        alike = f"what was tuned cannot be told from {'it' if near == 'no_batching' else 'them'}"
        return ": ", "nothing that was tuned is worth its parameters" if known else alike
    return ", ", f"hardly better than {name}" if known else f"so far not to be told from {name}"


def sure_text(probability: float) -> str:
    """A probability, never as a certainty."""
    return "over 99 %" if probability > 0.99 else percentage(probability)


def capitalised(text: str) -> str:
    """With a capital at the beginning, and the rest as it is."""
    return f"{text[:1].upper()}{text[1:]}"


def requests_text(rows: float | None) -> str:
    """How large the requests are."""
    if rows is None:
        return "requests"
    shown = f"{rows:.0f}" if abs(rows - round(rows)) < 0.01 else number(rows)
    return f"requests of {shown} row{'' if shown == '1' else 's'}"
