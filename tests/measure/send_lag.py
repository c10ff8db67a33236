"""How late did the client send? By the samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchtune.load.samples import NEVER_NS, Samples


def send_lag_ns(samples: Samples) -> NDArray[np.int64]:
    """How late the client itself sent each request that was sent, waits for the server excluded."""
    sent = samples.sent_ns != NEVER_NS
    return (samples.sent_ns - samples.due_ns - samples.connection_wait_ns)[sent]
