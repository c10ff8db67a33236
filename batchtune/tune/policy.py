"""How much time, how many trials and how near is near enough: every hand-set number of search, race and confirmation.

Durations are in seconds (`_S`), merits and margins in natural logarithms of the objective, shares and ratios are plain
numbers. `tests/benchmarks/replay/policy.py` moves each by 30 % on the recorded tables and prints what that does to
the regret.
"""

from __future__ import annotations

from typing import Literal

from batchtune.measure import bottleneck_figures as seen
from batchtune.scenario.spec.search import DEFAULT_TIME_BUDGET_S

# Any trial.

WORST_VIOLATION = 10.0
"""Relative violations are cut here, so that an undefined or infinite quantile stays a finite number."""

ENUMERABLE = 20_000
"""Grids up to this many points are listed when a sampler repeats itself."""

PATIENCE = 10.0
"""Answers later than so many times the SLO's largest limit are not waited for when a run has ended."""

SETTLE_LIMIT_S = 10.0
"""A server that was overwhelmed is given this long to come to rest,"""

SETTLE_STEP_S = 0.1
"""looked at so often."""

SETTLE_BATCHES = 1.5
"""A step lasts as many batches at least: a server within a batch counts nothing and looks at rest."""

SETTLE_STEPS_MIN = 20
"""Steps that a slow server is given at least: clients of a probe fill fewer batches than that."""

PROBE_WARM_UP_S = 0.3
"""Warm-up of the rule's short probes, when the scenario's is longer."""

HOPELESS_RATIO = 0.25
"""An open loop is ended when this share of its time is over and this share of all its requests is far beyond the
SLO."""

# The pace of a load, by what a batch takes. A rate read between the ends of n batches of one size is exact; n of 4 or 5
# leave room for one that was slow (twins of emulated devices of 250 ms a row, tests/tune/sweep/test_speed.py).

WARM_UP_BATCHES = 1.5
"""A closed loop starts with a batch of its first request alone; the next one is full."""

PROBE_BATCHES = 4
"""Batches in the measured part of a probe or of a run at one rate, at least."""

RUN_BATCHES = 5
"""Batches in the measured part of a trial, at least."""

RUN_BATCHES_MIN = 2
"""The same where the budget of time leaves no room for more."""

FRESH_BATCHES = 100
"""Batches in a fresh run at the capacity claimed: some per cent above what the server sustains its queue grows so
slowly that a short run keeps the limit (tests/benchmarks/twin/capacity_coverage.py: of 8 + 0.6·b ms 1 % too much was
established with 40 batches, of 40 + 2·b ms 5 % with 12)."""

RUN_SHARE = 1 / 12
"""A load that is longer than the scenario's takes at most this share of the budget: a race of a few and its
confirmation are a dozen runs."""

RUN_REQUESTS = 100
"""Requests of a trial of an open loop, at least: 72 independent ones bound p95."""

RUNG_REQUESTS = 40
"""Requests of a run at one rate of a search for a capacity, at least: below, p95 is the slowest one or two."""

RATE_REQUESTS_MIN = 4
"""Requests of a run at one rate, at least: a lower rate is not tried in the time there is."""

TIMEOUT_TURNS = 3.0
"""Where the scenario says nothing, a request may take as many times as long as the last in the queue should,"""

TIMEOUT_MAX_S = 600.0
"""but no longer than this: a server that hangs is to be found out."""

LONE_TIMEOUT_S = 60.0
"""The first request, of a server of unknown speed, is waited for this long where the scenario says nothing."""

LONE_ANSWERS = 5
"""A probe of one client goes on until so many answers, where that takes no longer than"""

LONE_MAX_S = 8.0
"""this. One answer is a measurement too."""

# Probes and references.

RULE_PROBE_S = 1.0
"""Length of each of the rule's two probes."""

SATURATING_CLIENTS = 16
"""Closed-loop clients of the probe for the throughput without batching, where the scenario's loop is open;"""

SATURATING_TURN_S = 4.0
"""fewer where they would wait for each other longer than this,"""

SATURATING_CLIENTS_MIN = 2
"""but two at least: the device is then never idle."""

CALIBRATION_S = 1.0
"""Measured part of a probe."""

CALIBRATION_CLIENTS = (4, 256)
"""Fewest and most clients of a probe."""

CALIBRATION_SHARE = 0.2
"""Calibration ends when it has taken this share of what was left of the time, and at least CALIBRATIONS_MIN probes."""

CALIBRATIONS_MIN = 2
"""Probes: two sizes tell what a row adds to a batch."""

RISING_FACTOR = 4
"""From one size to the next, where batches of the largest would take too long to begin with."""

# The capacity of one configuration.

CAPACITY_WARM_UP_MAX_S = 0.5
"""Probes follow each other on a warm server."""

CAPACITY_SEARCH_S = (8.0, 45.0)
"""Fewest and most seconds of a search; between them it takes"""

CAPACITY_SHARE = 0.2
"""at most this share of the time that the whole sweep has."""

CAPACITY_SEARCH_RUNS = 6
"""Of a slow server a search takes so many bursts at least, whatever its share: fewer rates bracket nothing."""

CAPACITY_PROBE_MAX_S = 15.0
"""A probe that is lengthened to hold enough requests takes no longer than this, or than a burst."""

BURST_CLIENTS = (8, 256)
"""Fewest and most clients of the first burst."""

MOST_MARGIN = 2.0
"""Margins are cut here: a server that has fallen behind shows no more than that it has."""

CLAIM_BELOW_CROSSING = 0.97
"""At the crossing itself every other run misses; this share of it is what a fresh run is expected to keep."""

RATE_ELASTICITY = 0.25
"""Change of log rate per change of log quantile near the capacity, where nothing else is known; from there to
saturation the quantile grows at least this much faster than the rate."""

CROSSING_LEAST_SD = 0.015
"""Standard deviation, in logs, of a crossing between rates that were held and missed, at least;"""

CROSSING_RUN_SD = 0.035
"""and between runs minutes apart."""

CROSSING_ONE_SIDED_SD = 0.03
"""The same of a crossing beyond all rates tried, to which the distance from them is added;"""

CROSSING_AHEAD_MAX = 0.1
"""in logs, it lies at most this far above what was held: a quantile that is low says little of how far,"""

CROSSING_BELOW_MAX = 0.4
"""and at most this far below what was missed, where a queue without end hides by how much."""

CROSSING_BRACKET_SHARE = 0.25
"""Standard deviation of a crossing as a share of the bracket in logs: of a uniform spread it is 0.29."""

NEAR_MARGIN = 0.3
"""A margin this small, on either side, tells where the crossing is; a larger one only on which side of the rate."""

WEIGHT_HALF_REQUESTS = 20.0
"""Independent requests at which a run weighs half in the fit: its quantile's own error is then that between runs."""

WEIGHT_LEAST = 0.05
"""Of a run of hardly any request: it counts, where nothing else is known."""

PROBE_WEIGHT = 0.5
"""Of one rate of a search for a capacity, whose requests are not counted one by one."""

SPOILT_WEIGHT = 0.5
"""Share of its weight that a run spoilt by the host or the client keeps."""

ERRORS_LEAST_MARGIN = 0.01
"""In logs: failed requests beyond those allowed are a miss, however few."""

# Noise between runs.

THROUGHPUT_PRIOR_SD = 0.03
"""Standard deviation of log throughput between runs, assumed before any is seen (a shared two-core machine)."""

LATENCY_PRIOR_SD = 0.06
"""The same for log latency quantiles."""

FRESH_THROUGHPUT_PRIOR_SD = 0.05
"""The same for a run some minutes later and from a cold start, which is what a recommendation promises.

With 0.03 a sweep in a quiet minute promised ±7 %, and a neighbour's busy minute then broke the promise.
"""

FRESH_LATENCY_PRIOR_SD = 0.08
"""The same for log latency quantiles."""

PRIOR_DEGREES = 4
"""Degrees of freedom that a prior standard deviation counts for: as much as five runs seen."""

CAPACITY_STEP = 1.05
"""A capacity that fresh runs refute is tried again at least this factor lower,"""

CAPACITY_GIVEN_UP = 0.7
"""down to this share of what the search had found."""

# Which leads.

INDIFFERENCE = 0.05
"""Objectives closer than this may be called equal; whether they are depends on the noise measured."""

# The rule and TF Serving's guide.

RULE_REDUCTION = 2.0
"""By this factor size and interval are reduced where a size does not work."""

RULE_REACHED_RATIO = 0.9
"""From this share of max_batch_size on, throughput × interval reaches it."""

RULE_BRACKET_RATIO = 1.2
"""A size that fills and one that does not, nearer than this, hold the fixed point between them."""

RULE_SAME_THROUGHPUT_RATIO = 0.05
"""Throughputs this close are the same to the rule."""

RULE_ROUNDS_MAX = 8
"""Sizes and intervals tried by the last two steps, the first answer included."""

PROBE_CLIENTS_MAX = 1024
"""Of a probe: enough to fill two batches, as far as one client process can."""

GUIDE_FILLING_TIMEOUT_MICROS = 1_000_000
"""So long that batches always fill while max_batch_size is tuned; never recommended."""

GUIDE_BULK_TIMEOUT_MICROS = 2_000_000
"""For bulk work only the last batch waits so long."""

GUIDE_TIMEOUTS_MICROS = (0, 1_000, 2_000, 5_000, 10_000)
"""Tried where the space names none: from none to the few milliseconds of the guide."""

GUIDE_TIMEOUTS_MAX = 5
"""Timeouts tried, of a longer list evenly spread ones: each is a whole trial."""

GUIDE_LONG_QUEUE_BATCHES = 1_000_000
"""Batches in a queue that no load fills, so that none is refused while sizes are tuned."""

GUIDE_LARGEST_ROWS = 1024
"""Sizes double up to so many times the rows of a request, where the space names none."""

GUIDE_FIRST_REQUESTS = 8
"""The size that is tried first holds so many requests; from there sizes rise, or fall."""

GUIDE_ENOUGH_GAIN = 0.05
"""Less throughput than this is not worth a larger batch: it only makes requests wait longer."""

GUIDE_SAME_OBJECTIVE = 0.02
"""Objectives closer than this, in logs, are the same to the guide, which then takes the lower p95."""

# The sampler.

STARTUP_TRIALS = 5
"""So many measured points are needed before TPE or a Gaussian process model anything."""

NSGA2_POPULATION = 8
"""Of NSGA-II: Optuna's 50 would be random draws for longer than most sweeps last."""

# What the guided search believes.

CELLS_MAX = 1500
"""Points of a larger space that are looked at, drawn at random."""

LOOK_SHARE = 0.1
"""The twin is not calibrated again when that last took more than this share of the time left."""

HOPELESS_MERIT = 5.0
"""Further than this (in logs) behind the best lies only what keeps the SLO at no rate."""

AS_GOOD = 0.02
"""A shorter timeout that is believed to cost less than this, in logs, is taken instead."""

PAYS_FROM = seen.PAYS_FROM
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

# Confirmation.

CONFIRMATIONS = 3
"""Fresh runs of what is recommended, at least; a spread needs three."""

CONFIRMATIONS_MAX = 5
"""More are added, while there is time, when the interval is `WIDE`."""

CONFIRMATION_BLOCKS_MAX = 9
"""Also when leaders keep failing their confirmation."""

WIDE = 0.1
"""Half of a prediction interval, relative, that is worth more runs."""

GAIN_HALF_WIDTH = 0.15
"""A gain known this well (in logs), and to half of itself, needs no more runs of the reference point."""

# Budget and failures.

TIME_BUDGET_S = DEFAULT_TIME_BUDGET_S
"""For everything, where the scenario gives no budget and the server is quick,"""

TIME_BUDGET_MAX_S = 1800.0
"""and at most this where it is slow."""

SURE_RUNS = 20
"""Runs of a sweep that ends with an answer: references, proposals, a race or what stands for it, and fresh runs."""

LIKELY_LOAD = 0.7
"""A capacity as a share of what full batches answer, before any rate was tried: only for how long runs will be."""

OVERRUN_SHARE = 0.1
"""A trial that is expected to end later than this beyond the budget of time is not begun."""

FAILURES_MAX = 3
"""So many failed trials, and none that worked, mean that it is not the configurations that are at fault."""

ALL_FAIL_RATIO = 0.9
"""From this share of failed requests on a trial shows nothing but the failure."""

FAILURES_TO_END = 6
"""The search ends after so many failed trials in a row, and what worked is confirmed: a size that fails may follow
others that do, but the calibration alone tries six that are spread over the whole space."""

RESERVE_SHARE = 0.25
"""Confirmations set aside at most this share of the time: of a small budget the search needs the most."""

REPEATS_MAX = 2
"""A trial that the host or the client spoilt is repeated at most so often,"""

REPEATS_SHARE = 0.15
"""and repeats take at most this share of the trials (and of the budget's time)."""

SEED_STRIDE = 1_000_003
"""Seeds of two blocks are this far apart: a prime, so that no block plays the schedule of another."""

# Comparisons.

COMPARE_REPEATS_SHARE = 0.5
"""Repeats end when so many, per trial planned, were made: that host is always noisy, and repeating buys nothing."""

PACE_PROBE_S = 0.3
"""Length of the probe that tells `compare` and `load` how slow the server is; a slower one is waited for."""

COMPARE_RETRIES = 1
"""A variant that fails is tried again so often in its block: a server may die of what has nothing to do with it."""

HARDLY = 0.05
"""A gain below this, sure as it may be, is called hardly any."""

# The recommendation.

ALTERNATIVE_GAIN = 0.05
"""An alternative has this much more throughput, or this much less p95."""

SAME_RATIO = 0.005
"""Ratios closer to 1 than this round to the same per cent."""

UNCONFIRMED_SHARE = 0.9
"""Share of a capacity that only the search found which is claimed: the best of many such is often too good."""

ESTABLISHED_RUNS = 3
"""Fresh runs that must have kept the SLO before a recommendation is called established."""

WORTH_GAIN = 0.05
"""Batching that gains less than this is not worth its parameters."""

FEW_POINTS = 3
"""Configurations with batching; where fewer were tried and miss the SLO it is not said that none meets it. A search
that is not cut short begins with as many: the defaults, the rule's answer, the guide's."""
