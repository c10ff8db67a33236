"""Which option is it that an error is about?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchtune.errors import UsageError


@contextmanager
def of_option(name: str, *, hint: str | None = None) -> Iterator[None]:
    """Put the option's name before the message of a UsageError; `hint` None: its own."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", hint=hint or error.hint) from error
