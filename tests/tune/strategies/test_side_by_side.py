"""Asks that may run at once, and strategies in step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.tune.strategies.side_by_side import after, in_step, together
from batchtune.tune.trials.trial import Ask


@dataclass
class Outlook:
    nodes: tuple[str, ...] = ()
    told: list[list[str]] = field(default_factory=list)

    def ahead(self, asks: Any) -> None:
        self.told.append([ask.reason for ask in asks])


def ask(reason: str) -> Ask:
    size = 1 + len(reason)
    return Ask(
        configuration=Configuration(batching=from_dict({"max_batch_size": size})),
        source="grid",
        reason=reason,
    )


def drive(asking: Any) -> tuple[list[str], Any]:
    """The reasons in the order of the asks; each is answered by its own reason in capitals."""
    reasons = []
    try:
        asked = next(asking)
        while True:
            reasons.append(asked.reason)
            asked = asking.send(asked.reason.upper())
    except StopIteration as end:
        return reasons, end.value


def climbing(name: str, turns: int, heard: list[Any]) -> Any:
    for turn in range(turns):
        heard.append((yield ask(f"{name}{turn}")))


def test_all_are_told_ahead_and_answered_in_order():
    outlook = Outlook(nodes=("n1", "n2"))
    reasons, trials = drive(together(outlook, [ask("a"), ask("b")]))
    assert outlook.told == [["a", "b"]]
    assert (reasons, trials) == (["a", "b"], ["A", "B"])


def test_strategies_in_step_ask_together_until_the_last_has_ended():
    outlook, heard = Outlook(nodes=("n1", "n2")), []
    drive(in_step(outlook, [climbing("a", 1, heard), climbing("b", 3, heard), climbing("c", 0, heard)]))
    assert outlook.told == [["a0", "b0"], ["b1"], ["b2"]]
    assert heard == ["A0", "B0", "B1", "B2"]


def test_with_one_server_each_runs_to_its_end_before_the_next_begins():
    outlook, heard = Outlook(), []
    reasons, _ = drive(in_step(outlook, [climbing("a", 2, heard), climbing("b", 1, heard)]))
    assert (reasons, outlook.told) == (["a0", "a1", "b0"], [])


def test_what_comes_after_an_ask_is_known_whatever_is_expected_of_it():
    first, second, third = ask("a"), ask("bb"), ask("ccc")
    assert after(replace(second, expected="900 requests/s"), [first, second, third]) == [third]
    assert after(first, [second, third]) == []
