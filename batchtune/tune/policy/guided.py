"""What does the guided search believe, propose and race?"""

from __future__ import annotations

from typing import Literal

from batchtune.measure import bottleneck_figures

# What the guided search believes.

CELLS_MAX = 1500
"""Points of a larger space that are looked at, drawn at random."""

LOOK_SHARE = 0.1
"""The twin is not calibrated again when that last took more than this share of the time left."""

HOPELESS_MERIT = 5.0
"""Further than this (in logs) behind the best lies only what keeps the SLO at no rate."""

AS_GOOD = 0.02
"""A shorter timeout that is believed to cost less than this, in logs, is taken instead."""

PAYS_FROM = bottleneck_figures.PAYS_FROM
"""Batching that makes no size this much cheaper per row than one row alone cannot pay: noise alone makes as much."""

WIDE_SIZES = 4
"""That is said of batches only where the largest seen holds so many times the rows of the smallest,"""

SEEN_BATCHES_MIN = 5
"""of sizes that were seen so often at least."""

ERROR_SHARE = 0.5
"""The twin's mean error, over p95 and throughput, that shows in the objective; p95 near saturation errs the most."""

CONTENDERS_MIN = 2
"""Contenders named whatever their chances;"""

CONTENDER_CHANCE = 0.1
"""others by this probability of being near the best, at least: below, a run side by side is rarely worth its time."""

NO_RATE_MERIT = -20.0
"""The merit, relative to the others, of a point that keeps the SLO at no rate."""

TWIN_PRIOR_ERROR = 0.06
"""The twin is thought to be this far off, in logs, where its fit does not say: its usual error."""

TWIN_LEAST_ERROR = 0.01
"""No twin is trusted more than this, in logs: about what two runs differ by."""

TWIN_MOST_ERROR = 0.3
"""and none less than this: what is measured then outweighs it in any case."""

TWIN_PRIOR_WEIGHT = 6.0
"""What its fit says of the twin's error counts for so many points measured."""

ALONE_PRIOR_SD = 0.5
"""Without a twin points are thought to differ by this, in logs: a factor of 1.6."""

KERNEL_LENGTH = 0.5
"""Distance, as a share of an edge of the space, at which the part that fades is down to 0.61."""

KERNEL_COMMON_SHARE = 0.4
"""Share of the twin's error, as a variance, that all points have in common."""

BOUND_SD = 0.02
"""What a bound leaves open, in logs: neighbours move by little less than the point itself."""

READINGS = 8
"""Readings of the twin that the search looks at; more cost time and add little."""

CLOSE_MERIT = 0.12
"""Only the points that one reading puts this near (in logs) to the best are looked at by all readings,"""

CLOSE_POINTS_MAX = 12
"""and at most so many."""

STALE_MERIT = 0.15
"""Points that were this far behind the best when the twin was asked last, and are believed to be, are not asked about
again."""

MOST_OVER = 2.0
"""An open loop whose watched quantile exceeds its limit more than this tells the twin nothing."""

BREACH_WEIGHT = 4.0
"""Logs of merit lost for each log by which a limit is exceeded: an SLO that is nearly kept is nearly as good."""

# The guided search.

PROPOSALS_BLOCK = 5
"""Proposals between two calibrations; one in each is the sampler's own."""

HASTY_REFERENCES: dict[int, Literal["no_batching", "defaults"]] = {1: "no_batching", 3: "defaults"}
"""After so many proposals of the twin a reference point is measured when there is time for few trials."""

SURVIVORS = 5
"""Configurations in a race, at most: each costs a run in every block."""

SEARCH_SHARE = 0.45
"""Share of the time after the seeds that may go to proposals; the rest is the race's."""

TIGHT_RUNS = 12
"""With time for fewer runs than this after the calibration, all of it goes to what the twin proposes: the usual answers
and a race would leave none."""

FRONT_END_SHARE = 0.2
"""From this share of what a batch of all clients costs on, such a batch is tried: the twin does not know what a front
end saves by it (24 % of strings by REST at a share of 0.5; results/reference/tables)."""

PROPOSAL_GAIN_MIN = 0.025
"""Proposals end when they are expected to add less than this, twice."""

RATE_SHARE = 0.98
"""A proposal is tried at this share of the rate that it, or the leader, is expected to take,"""

STEP_UP = {"leads": 1.0, "shares": 0.3, "off": 0.12}
"""but at most this far (in logs) above the leader's, by how far the twin is trusted."""

RACE_START_SHARE = 0.97
"""Where the ladder of the race begins, as a share of what the leader is expected to take."""

REFERENCE_RUNS = 4
"""A reference point's capacity is sought by so many runs,"""

REFERENCE_STEP = {True: 0.08, False: 0.2}
"""so far apart, as a share of the rate,"""

REFERENCE_SD = {True: 0.03, False: 0.06}
"""until it is known to this, in logs; more roughly, False, where the twin puts it FAR_BEHIND the best."""

FAR_BEHIND = 0.7
"""In logs, half of the best: no error of a twin that is trusted makes up for it."""

# The race.

RACE_ALPHA = 0.05
"""Probability, over the whole race, that the best survivor is dropped."""

RACE_SURE = 0.95
"""Probability with which all survivors must lie within the indifference zone for the race to end."""

RACE_FIRST_LOOK = 3
"""Blocks before a survivor may be dropped."""

RACE_BLOCKS_MAX = 8
"""Blocks of a race, at most: gaps that these do not show are within the noise."""

RUNGS_MAX = 8
"""Rates of a ladder, at most: eight steps of RUNG are a factor of 1.5."""

RUNG = 1.05
"""Step from one rate of the ladder to the next: as fine as INDIFFERENCE."""

LONG_RUNG = 1.1
"""The step up while every survivor keeps the limit easily, by EASY_MARGIN in logs."""

EASY_MARGIN = -0.4
"""In logs, a quantile of two thirds of its limit."""

RUNG_S = 2.0
"""Longest measured part of a run on the ladder."""

BOUNDARY_RUNS = 6
"""Runs of the leader around its crossing when the race is over, at most: two, and more while nothing was missed yet."""

BOUNDARY_STEP = {True: 1.03, False: 0.98}
"""Their rates as shares of where the crossing is expected: above it where something was held, else below."""

MIXTURE_AT_BLOCKS = 6.0
"""The bound is tightest at about so many blocks."""
