"""What do the rule, TF Serving's guide and the samplers try?"""

from __future__ import annotations

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
