# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a rank, told with what it was doing; what the text of a runtime means is known to the parent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RankError(Exception):
    """A runtime or its package failed.

    Attributes:
        doing: for the message.
        missing: whether the package could not be imported.
    """

    def __init__(self, doing: str, error: Exception) -> None:
        super().__init__(str(error).strip() or type(error).__name__)
        self.doing = doing
        self.missing = isinstance(error, ImportError)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Says what was done when something inside raised."""
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        raise RankError(what, error) from error
