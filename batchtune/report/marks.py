"""Which figures deserve less trust, and why: a letter at every figure that a caveat touches, each told once below."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchtune.measure.validity.caveats import Caveat, Touches


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The caveats of one report by whom they concern: a variant, a load point, the recommended configuration.

    What touches everything stands once, at the name that heads the row or the column.
    """

    caveats: Mapping[str, Sequence[Caveat]]

    def at(self, whose: str, *kinds: Touches) -> str:
        """The letters that stand at this one's figures of these kinds; empty when nothing speaks against them."""
        letters = self._letters()
        touching = {letters[caveat.code] for caveat in self.caveats[whose] if caveat.touches in kinds}
        return "".join(sorted(touching))

    def head(self, whose: str) -> str:
        """The name that heads its figures, with the letters that hold for all of them."""
        return self.marked(whose, whose, "everything")

    def marked(self, text: str, whose: str, *kinds: Touches) -> str:
        """A figure with its letters behind it."""
        letters = self.at(whose, *kinds)
        return f"{text} {letters}" if letters else text

    def lines(self, *, named: str = "") -> list[str]:
        """`a  (whose) text — advice` for each caveat; the same advice is given once.

        Whose it is stays away where it concerns all; `named` says what the names are, such as "clients".
        """
        lines: list[str] = []
        first_with: dict[str, str] = {}
        for code, letter in self._letters().items():
            concerned = {
                whose: caveat
                for whose, many in self.caveats.items()
                for caveat in many
                if caveat.code == code
            }
            caveat = list(concerned.values())[-1]
            names = f"{named} {', '.join(concerned)}".strip()
            whose = "" if len(concerned) == len(self.caveats) else f"({names}) "
            earlier = first_with.setdefault(caveat.advice, letter)
            advice = caveat.advice if earlier == letter else f"as for {earlier}"
            lines.append(f"{letter}  {whose}{caveat.text} — {advice}")
        return lines

    def _letters(self) -> dict[str, str]:
        codes = dict.fromkeys(caveat.code for many in self.caveats.values() for caveat in many)
        return dict(zip(codes, string.ascii_lowercase, strict=False))
