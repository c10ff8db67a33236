"""The failures that are expected, and the exit code with which each one ends a command.

BatchtuneError                        70  never raised itself
├── UsageError                         2  the command line or a file given on it is wrong
│   ├── ScenarioError                  2  a scenario does not say what we can do; names file, line and key
│   ├── BatchingParametersError        2  batching parameters that no server would accept, or a file we cannot read
│   └── ArchiveError                   2  a results directory that is missing, corrupt or of another schema
├── NoFeasibleConfigurationError       3  nothing measured meets the SLO; a load test missed it
├── BaselineError                      4  the baseline is missing or not comparable
├── InconclusiveError                  5  the measurements cannot decide
│   └── TwinError                      5  there is too little measured to calibrate the twin, or it cannot answer
├── MeasurementInvalidError            6  the client was the limit, or the host was noisy
└── TargetError                        7  the server did not start, died, hung or cannot be reached
    ├── ServerGoneError                7  a running server of somebody else's ended, or hangs
    └── WrongAnswerError               7  the server answers, but not as the scenario says: a wrong address, body or app
"""

from __future__ import annotations

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


class BatchtuneError(Exception):
    """An expected failure. `message`: what was wrong and where; `hint`: what to do next, "" for nothing to add."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(BatchtuneError):
    exit_code = 2


class ScenarioError(UsageError):
    """A scenario that cannot be run; the message begins with `file:line: key:`.

    `path`: of the key, where the message begins with the key alone, because the file is not known where it is raised.
    """

    def __init__(self, message: str, *, hint: str = "", path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class BatchingParametersError(UsageError):
    """Batching parameters that break a rule of TF Serving, or text that does not parse."""


class ArchiveError(UsageError):
    """A results directory that cannot be read."""


class NoFeasibleConfigurationError(BatchtuneError):
    exit_code = 3


class BaselineError(BatchtuneError):
    exit_code = 4


class InconclusiveError(BatchtuneError):
    exit_code = 5


class TwinError(InconclusiveError):
    """A twin that cannot be calibrated from what was measured, or a question that it cannot answer."""


class MeasurementInvalidError(BatchtuneError):
    exit_code = 6


class TargetError(BatchtuneError):
    exit_code = 7


class ServerGoneError(TargetError):
    """A running server that others start has ended or hangs: no further trial can succeed."""


class WrongAnswerError(TargetError):
    """The server answers a lone request with an error, a redirect, no JSON or no end: the address, body or app is
    wrong."""


NO_ANSWER = (TargetError, MeasurementInvalidError, NoFeasibleConfigurationError, InconclusiveError)
"""Errors that say why there is no recommendation or no verdict, the most serious first."""
