# SPDX-License-Identifier: Apache-2.0
"""Errors between this machine and the Hub: tried again where that helps, and explained in one sentence otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import first_line


_Value = TypeVar("_Value")
# The base of the errors of whichever HTTP client the Hub's client brings.
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_TOO_MANY = 429
_TRIES, _LONGEST_WAIT = 4, 60  # the wait in seconds
_AGAIN = "what was done stays, so run the command again"


def try_again(call: Callable[[], _Value]) -> _Value:
    """Call a function again where the Hub is busy, fails or cannot be reached, and its client does not repeat the call."""
    for wait in (2**tries for tries in range(_TRIES - 1)):
        try:
            return call()
        except (HfHubHTTPError, HTTP_ERROR, RuntimeError) as error:
            cause = cause_of(error)
            if not _may_pass(cause):
                raise
            time.sleep(min(_retry_after(cause) or wait, _LONGEST_WAIT))
    return call()


def _may_pass(error: BaseException) -> bool:
    status = status_of(error)
    return status == _TOO_MANY or status >= 500 if status is not None else isinstance(error, HTTP_ERROR)


@contextmanager
def explained_errors(repo: str, revision: str, *, other_way: str = "") -> Iterator[None]:
    """Replace the errors of the Hub's client by one sentence with the remedy.

    Args:
        revision: a branch, tag or commit, which the error names where there is none such.
        other_way: a remedy where the Hub allows none of it, as an end of a sentence.

    Raises:
        ValueError: `repo` is no name of a repository.
        FileNotFoundError: there is no such repository or revision, for this token.
        RuntimeError: the Hub refuses, fails, or cannot be reached, or must not be asked.
    """
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name of a Hub repository; name it as in org/name") from error
    except (HfHubHTTPError, HTTP_ERROR, OfflineModeIsEnabled, LocalEntryNotFoundError, RuntimeError, OSError) as error:
        cause = cause_of(error)
        missing = _missing_text(cause, repo, revision)
        if missing is not None:
            raise FileNotFoundError(missing) from error
        problem = _problem_text(cause, repo, other_way)
        if problem is None:
            raise
        raise RuntimeError(problem) from error


def cause_of(error: BaseException) -> BaseException:
    """Return the cause that the Hub's client has wrapped in an error."""
    while isinstance(error, LocalEntryNotFoundError | RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _missing_text(error: BaseException, repo: str, revision: str) -> str | None:
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; leave it out, or name a branch that it has"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return f"{repo} is no Hub repository that can be read; check the name, pass token (--token), or make it first: hf repo create {repo}"
    return None


def _problem_text(error: BaseException, repo: str, other_way: str) -> str | None:
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to reach {repo}"
    status = status_of(error)
    if status is None:
        if isinstance(error, HTTP_ERROR):
            return f"the Hub cannot be reached ({first_line(error)}); check the connection: {_AGAIN}"
        return None
    if status == 401:
        return "the Hub does not take this token (401), or got none; pass one as token (--token), or log in: hf auth login"
    if status == 403:
        return (
            f"this token may not do that with {repo} (403); ask for access, or pass a token (--token) that allows it"
            f"{other_way}"
        )
    if status in (409, 412):
        return f"{repo} was changed at the same time by another program ({status}); {_AGAIN}"
    if status == _TOO_MANY:
        wait = _retry_after(error)
        return f"the Hub has had too many requests (429); {_AGAIN} {f'in {wait} s' if wait else 'later'}"
    if status >= 500:
        return f"the Hub fails with status {status}; {_AGAIN} later"
    return f"the Hub refuses with status {status}: {first_line(error)}; check the repository's name, the revision and the token"


def status_of(error: BaseException) -> int | None:
    """Return the status of the Hub's answer, None if an error has none."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after(error: BaseException) -> int | None:
    """Return the seconds that the Hub asks to wait."""
    text = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(text) if text.isdigit() else None
