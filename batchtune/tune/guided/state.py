"""What does the guided search know so far: the twin, what is believed of every point, who leads?"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.scenario.units import counted, rounded, rounded_duration
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, is_inside, pool
from batchtune.tune.evidence.ranking import leaders
from batchtune.tune.guided.merits import calibrated, foresees, measured_merits, most_merits, predicted_merits
from batchtune.tune.guided.posterior import Beliefs, Cell, Kinship, Measured
from batchtune.tune.strategies.protocol import Outlook
from batchtune.tune.strategies.references import reference_configurations
from batchtune.tune.trials.search_summary import SearchSummary, Trust
from batchtune.tune.trials.space import in_force, lies_inside
from batchtune.tune.trials.trial import NO_CANDIDATES
from batchtune.twin.model.twin import Twin

TIMEOUT = "batch_timeout_micros"
THREADS = "num_batch_threads"


class Insight:
    """Everything measured, read through the twin; tells the `findings` what it makes of it.

    `twin` is None while none can be calibrated, `believed` the draws over all `cells`.
    """

    believed: Beliefs

    def __init__(self, outlook: Outlook, findings: SearchSummary) -> None:
        self._outlook = outlook
        self._scenario = outlook.scenario
        self._findings = findings
        self.cells = _cells(outlook)
        self._kinship = Kinship(self.cells, outlook.space)
        self.twin: Twin | None = None
        self._predicted: NDArray[np.float64] | None = None
        self._most: NDArray[np.float64] | None = None
        self._look_s = 0.0
        self._pending: frozenset[Configuration] = frozenset()
        self.look()

    def look(self, *, test: bool = True) -> None:
        """Calibrate the twin with everything measured, and judge every point anew.

        Where that takes too much of the time that is left, what was predicted last stands, corrected by what was
        measured since.
        """
        self._add_cells()
        left_s = self._outlook.remaining_s()
        if self._look_s > policy.LOOK_SHARE * left_s:
            self.believe()
            return
        self._outlook.thinking(f"the twin is fitted to {counted(len(self._outlook.trials), 'trial')}")
        seed = self._scenario.search.seed
        twin = calibrated(self._outlook.trials, self._scenario, seed=seed, test=test)
        if twin is not None and self.twin is not None and not test:
            twin = replace(twin, error=self.twin.error)
        self.twin = twin
        stale = self._stale()
        before, self._predicted = self._predicted, None
        self._most = None
        if twin is not None and twin.trust != "off":
            if self._scenario.objective == "capacity":
                self._most = most_merits(twin, self._scenario, self.cells)
            merits = predicted_merits(twin, self._scenario, self.cells, before=before, stale=stale)
            # Where no point keeps the SLO at any rate there is no rate to try a point at: the trials find theirs.
            self._predicted = merits if np.isfinite(merits).any() else None
        self._tell()
        self.believe()
        if math.isfinite(left_s):
            self._look_s = left_s - self._outlook.remaining_s()

    def believe(self, *, fresh: bool = False, pending: Sequence[Configuration] = ()) -> None:
        """Correct what the twin predicted last by everything measured since; fresh runs are not for choosing. Of
        what is `pending`, proposed and not measured, what is expected counts as measured."""
        self._pending = frozenset(pending)
        measured = measured_merits(self._outlook.trials, self._scenario, self.cells, fresh=fresh)
        for at in {at for at in map(self.place, pending) if at is not None} - measured.keys():
            measured[at] = Measured(merit=self.expected(at), sd=policy.THROUGHPUT_PRIOR_SD)
        self.believed = Beliefs(
            self._kinship,
            predicted=self._predicted,
            measured=measured,
            error=None if self.twin is None else policy.ERROR_SHARE * self.twin.error.mape,
            barred=self.barred(),
            most=self._most,
            seed=self._scenario.search.seed,
        )

    def _stale(self) -> frozenset[int]:
        """The cells that were far behind the best when the twin was asked last, and are still believed to be."""
        if self._predicted is None:
            return frozenset()
        expected = self.believed.expected  # cells that were added since are hoped to be the best
        predicted = self._predicted[: len(expected), 0]
        far = [merits < merits.max() - policy.STALE_MERIT for merits in (predicted, expected)]
        return frozenset(np.flatnonzero(far[0] & far[1]).tolist())

    def _add_cells(self) -> None:
        """Take in the points of the space that were measured but not drawn: else nobody would judge them.

        Until the twin is asked about one it is hoped to be the best, so that the twin will be asked.
        """
        known = {cell.configuration for cell in self.cells}
        more = {
            trial.configuration: Cell(configuration=trial.configuration, point=trial.point)
            for trial in self._outlook.trials
            if trial.point is not None
            and trial.source not in NO_CANDIDATES
            and trial.configuration not in known
        }
        if not more:
            return
        self.cells += more.values()
        self._kinship = Kinship(self.cells, self._outlook.space)
        if self._most is not None:
            self._most = np.append(self._most, np.full(len(more), np.inf))
        if self._predicted is not None:
            best = self._predicted.max(axis=0)
            self._predicted = np.vstack([self._predicted, *[best] * len(more)])

    def _tell(self) -> None:
        twin, findings = self.twin, self._findings
        if twin is None:
            findings.trust, findings.trust_reason = "off", "no measurement could calibrate the twin"
            return
        findings.twin, findings.trust, findings.trust_reason = twin.to_dict(), twin.trust, twin.explain()
        findings.twin_error = {
            "p95": twin.error.p95_ratio,
            "throughput": twin.error.throughput_ratio,
            "spearman": twin.error.spearman,
        }

    def cannot_pay(self) -> bool:
        """Whether τ(b) is proportional to b and the twin sees no point that beats no batching."""
        twin = self.twin
        if twin is None or self._scenario.objective == "latency" or self._predicted is None:
            return False
        size, gains = _gains_per_row(twin)
        off = next((at for at, cell in enumerate(self.cells) if cell.configuration.batching is None), None)
        if off is None or not foresees(twin, self._scenario, self.cells):
            return False
        ahead = self._predicted[self.batched()].max(axis=0) - self._predicted[off]
        if not (np.median(gains) < policy.PAYS_FROM and np.median(ahead) < math.log(policy.PAYS_FROM)):
            return False
        tau = twin.best.tau_s
        self._findings.cannot_pay = (
            f"batching cannot pay: the time of a batch is proportional to its rows ({rounded_duration(tau[1])} for 1, "
            f"{rounded_duration(tau[size])} for {size}), so {size} rows together cost "
            f"{1.0 / np.median(gains):.2f} times what they cost one by one"
        )
        self._findings.stop_reason = "the probes show that batching cannot pay; only that was confirmed"
        return True

    @property
    def trust(self) -> Trust:
        return "off" if self.twin is None else self.twin.trust

    @property
    def predicts(self) -> bool:
        """Whether the twin has a say in what is believed."""
        return self._predicted is not None

    def batched(self) -> list[int]:
        """The cells with batching."""
        return [at for at, cell in enumerate(self.cells) if cell.configuration.batching is not None]

    def expected(self, at: int) -> float:
        """The merit expected of a cell."""
        return float(self.believed.expected[at])

    def hopeless(self, at: int) -> bool:
        """Whether it is believed to keep the SLO at no rate."""
        return self.expected(at) <= float(self.believed.expected.max()) - policy.HOPELESS_MERIT

    def place(self, configuration: Configuration) -> int | None:
        """Where a configuration stands among the cells."""
        return next((at for at, cell in enumerate(self.cells) if cell.configuration == configuration), None)

    def leader(self) -> int:
        """The cell that would be recommended now; without one that keeps the SLO the best that is believed in."""
        ranked = leaders(self._pooled_inside(), scenario=self._scenario)
        places = (self.place(candidate.configuration) for candidate in ranked)
        return next((at for at in places if at is not None), self.believed.best())

    def claim_rps(self) -> float:
        """The highest capacity that the measurements alone vouch for; 0 without one."""
        return max(
            (candidate.value for candidate in self._pooled_inside() if candidate.feasible), default=0.0
        )

    def _pooled_inside(self) -> list[Pooled]:
        pooled = pool(self._outlook.trials, scenario=self._scenario)
        return [candidate for candidate in pooled if is_inside(candidate, self._scenario)]

    def most_rps(self, at: int) -> float:
        """What the full batches of a cell can answer at most, by the twin; inf where nothing tells."""
        return math.inf if self._most is None else math.exp(float(self._most[at]))

    def held_rps(self) -> float:
        """As `claim_rps`, of whatever was measured, also outside the space: so much the device can do."""
        pooled = pool(self._outlook.trials, scenario=self._scenario)
        return max((measured.value for measured in pooled if measured.feasible), default=0.0)

    def nearly_held_rps(self) -> float:
        """The highest capacity that runs near the limit point to, held or missed by little; 0 without one."""
        return max((math.exp(merit) for merit in self.believed.known_merits()), default=0.0)

    def is_measured(self, configuration: Configuration) -> bool:
        return any(
            trial.configuration == configuration and trial.source not in NO_CANDIDATES
            for trial in self._outlook.trials
        )

    def simplest(self, at: int) -> int:
        """The same size and threads with the shortest timeout that is believed to be as good."""
        return self._least_as_good(at, TIMEOUT)

    def fewest_threads(self, at: int) -> int:
        """The same size and timeout with the fewest threads that are believed to be as good."""
        return self._least_as_good(at, THREADS)

    def _least_as_good(self, at: int, knob: str) -> int:
        least = self.expected(at) - policy.AS_GOOD
        alike = [place for place in self.siblings(at, knob) if self.expected(place) >= least]
        return min(alike, key=lambda place: in_force(self.cells[place].configuration, knob), default=at)

    def settled(self) -> frozenset[int]:
        """The cells that were measured, and those that differ from one in the timeout only and not to the twin: another
        proposal of theirs would tell nothing new."""
        tried = {trial.configuration for trial in self._outlook.trials if trial.source not in NO_CANDIDATES}
        tried |= self._pending
        measured = {at for at, cell in enumerate(self.cells) if cell.configuration in tried}
        if self._predicted is None:
            return frozenset(measured)
        predicted = np.median(self._predicted, axis=1).tolist()
        alike = {
            place
            for at in measured
            for place in self.siblings(at)
            if abs(predicted[place] - predicted[at]) < policy.AS_GOOD
        }
        return frozenset(measured | alike)

    def unwaiting(self, at: int) -> int:
        """The same size and threads with the space's shortest timeout: what a timeout must beat to be worth having."""
        return min(
            self.siblings(at),
            key=lambda place: in_force(self.cells[place].configuration, TIMEOUT),
            default=at,
        )

    def barred(self) -> frozenset[int]:
        """The cells whose batches may hold as many rows as have run out of memory."""
        space = self._outlook.space
        return frozenset(at for at, cell in enumerate(self.cells) if space.is_barred(cell.configuration))

    def siblings(self, at: int, knob: str = TIMEOUT) -> list[int]:
        """The cells that differ from this one in that knob only, itself included; none outside the space."""
        point = self.cells[at].point
        if point is None or knob not in point:
            return []
        wanted = {**point, knob: None}
        return [
            place
            for place, cell in enumerate(self.cells)
            if cell.point is not None and {**cell.point, knob: None} == wanted
        ]

    def words(self, at: int) -> str:
        """What the objective of a cell is expected to be, in words."""
        expected = math.exp(self.expected(at))
        return {
            "throughput": f"{rounded(expected)} requests/s",
            "capacity": f"a capacity of {rounded(expected)} requests/s",
            "latency": f"a p95 of {rounded_duration(1.0 / expected)}",
        }[self._scenario.objective]

    def conclude(self) -> None:
        """How near to the best of the space each configuration measured is believed to be, by all runs."""
        self._add_cells()
        self.believe(fresh=True)
        inside = [at for at, cell in enumerate(self.cells) if cell.point is not None]
        self._findings.judged = len(inside)
        self._findings.near_best = {
            self.cells[at].configuration.label(): self.believed.near_best(at, among=inside)
            for at in self.believed.measured
        }


def _cells(outlook: Outlook) -> list[Cell]:
    """The points that some server would accept, and the reference points."""
    space, scenario = outlook.space, outlook.scenario
    if space.size <= policy.CELLS_MAX:
        points = list(space.points())
    else:
        chance = random.Random(scenario.search.seed)
        drawn = {
            tuple(chance.randrange(count) for count in space.shape.values()) for _ in range(policy.CELLS_MAX)
        }
        points = [space.point(indices) for indices in sorted(drawn)]
    cells: dict[Configuration, Cell] = {}
    for point in points:
        configuration = space.configuration(point)
        if configuration is not None:
            cells.setdefault(configuration, Cell(configuration=configuration, point=point))
    for configuration in reference_configurations(scenario).values():
        point_of = space.locate(configuration)
        inside = point_of is not None or lies_inside(configuration, scenario)
        cells[configuration] = Cell(configuration=configuration, point=point_of, inside=inside)
    return list(cells.values())


def _gains_per_row(twin: Twin) -> tuple[int, NDArray[np.float64]]:
    """The size at which a row is cheapest (where it is cheapest alone the largest one), and how many times cheaper than
    alone it is there, by each reading."""
    sizes = np.arange(1, twin.rows_max + 1)
    gains = np.array([draw.tau_s[1] * sizes / draw.tau_s[1 : twin.rows_max + 1] for draw in twin.draws])
    best = int(np.argmax(np.median(gains, axis=0))) or len(sizes) - 1
    return best + 1, gains[:, best]
