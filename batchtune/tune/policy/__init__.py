"""How much time, how many trials and how near is near enough: every hand-set number, read as `policy.NAME`.

Durations are in seconds (`_S`), merits and margins in natural logarithms of the objective, shares and ratios are plain
numbers. `tests/benchmarks/replay/policy.py` moves each by 30 % on the recorded tables and prints what that does to
the regret.
"""

from batchtune.tune.policy.budget import *
from batchtune.tune.policy.capacity import *
from batchtune.tune.policy.claims import *

from batchtune.tune.policy.load import *


