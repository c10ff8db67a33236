"""Why is there no answer for several models: were SLOs broken, did nothing work, or was the client the limit?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.errors import (
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
)
from batchtune.scenario.units import counted
from batchtune.tune.joint.load import JointLoad


def nothing_holds(loads: Sequence[JointLoad]) -> BatchtuneError:
    """The error to raise where no load of all models kept every SLO."""
    together = [load for load in loads if load.ask.kind == "together"]
    if loads and all(load.failure is not None for load in loads):
        return TargetError(f"every load failed; the last: {loads[-1].failure}")
    if not together:
        return InconclusiveError(
            "nothing was measured with all models loaded", hint="give it more time: --budget 10m"
        )
    telling = [load for load in together if load.tells]
    if not telling:
        return _nothing_told(together)
    refuted = next((load for load in telling if load.holds), None)
    if refuted is not None:
        return NoFeasibleConfigurationError(
            f"all models kept their SLOs together at {refuted.ask.factor:.3g} times the stated rates, but not in most "
            "of the fresh runs",
            hint="lower the rates, loosen an SLO, or give the sweep more time (--budget) to try others",
        )
    tightest = min(telling, key=lambda load: load.tightness)
    if math.isinf(tightest.tightness):
        return NoFeasibleConfigurationError(
            f"all models never kept their SLOs together: in each of {counted(len(telling), 'load')} too many requests "
            "failed",
            hint="lower the rates, raise slo.errors, or give search.space larger values of max_enqueued_batches",
        )
    return NoFeasibleConfigurationError(
        f"all models never kept their SLOs together; the nearest used {tightest.tightness:.3g} times a limit at "
        f"{tightest.ask.factor:.3g} times the stated rates",
        hint="lower the rates, loosen an SLO, or widen search.space",
    )


def _nothing_told(together: Sequence[JointLoad]) -> BatchtuneError:
    failures = [load.failure for load in together if load.failure is not None]
    if failures:
        return TargetError(f"no load of all models worked; the last: {failures[-1]}")
    return MeasurementInvalidError(
        "the client was the limit in every load of all models: nothing is told of the server",
        hint="lower the rates, or give the client more: load.processes, load.cpus",
    )
