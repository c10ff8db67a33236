"""What did a check find, and how are many of them asked at once without waiting for one that hangs?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a check found, in one phrase, and what to do about it ("": nothing); `version` of what is installed.

    "missing": it is not there, which may be as it should; "problem": it is there and does not do.
    """

    state: Literal["ok", "missing", "problem"]
    text: str
    advice: str = ""
    version: str | None = None


Question: TypeAlias = Callable[[], Check]


def answers(questions: Mapping[str, Question], *, limit_s: float) -> Iterator[tuple[str, Check]]:
    """What each question found, in their order; all are asked at once.

    None is waited for beyond `limit_s`: its thread is left behind and ends with this process.
    """
    give_up_s = time.monotonic() + limit_s
    boxes = {name: _asked(question) for name, question in questions.items()}
    for name, box in boxes.items():
        try:
            check = box.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except Empty:
            check = Check(state="problem", text=f"no answer within {limit_s:g} s")
        yield name, check


def _asked(question: Question) -> SimpleQueue[Check]:
    box: SimpleQueue[Check] = SimpleQueue()

    def answer() -> None:
        try:
            box.put(question())
        except Exception as error:  # noqa: BLE001 - what a check cannot do is its finding, whatever it is
            box.put(Check(state="problem", text=f"could not be checked: {type(error).__name__}: {error}"))

    Thread(target=answer, daemon=True).start()
    return box
