"""What every test needs of the process that runs it."""

from __future__ import annotations

import signal

# A shell's background job is started with Ctrl-C ignored, and would hand that on to what the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
