# SPDX-License-Identifier: Apache-2.0
"""The error of unsupported models, and errors of other libraries in one line. It imports nothing of the project."""

from __future__ import annotations

import errno
import re
import sys


# States of a path by the number of an error, and the remedies.
_OF_PATHS = {
    errno.ENOENT: "does not exist; check the name",
    errno.EEXIST: "exists already, and is something else; name another one, or remove it",
    errno.EACCES: "is not accessible to this user (Permission denied); name another one, or change its permissions",
    errno.EPERM: "cannot be changed so by this user (Operation not permitted); name another one",
    errno.EISDIR: "is a folder; name a file",
    errno.ENOTDIR: "cannot be there: a part of its path is a file; name another path",
    errno.ENAMETOOLONG: "cannot be there: File name too long; shorten it",
    errno.ELOOP: "is a link that leads to itself; name what it should lead to",
    errno.EROFS: "lies on a disk that is only read (Read-only file system); name another place",
    errno.ENOSPC: "has no space left on its disk; free some, or name another place",
    errno.EDQUOT: "exceeds this user's share of the disk; free some, or name another place",
    errno.EFBIG: "becomes larger than a file may be here (ulimit -f); raise the limit, or name another place",
    errno.EMFILE: "is one file more than this process may open (ulimit -n); raise the limit",
    errno.EPIPE: "is not read any more (Broken pipe); keep its reader open",
}
_LONGEST_NAME = 300
_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


class UnsupportedModelError(ValueError):
    """A model that step graphs cannot compute; the message completes "<model> cannot be exported: "."""


def check_system() -> None:
    """Raise ImportError on Windows, where Python lacks the locks of files and the kinds of processes that this package uses."""
    if sys.platform == "win32":
        raise ImportError(
            "optimum-neuron-runtime runs on Linux and macOS, and this system is Windows; run it in WSL 2 or in a container"
        )


def explain_error(error: BaseException) -> str:
    """Return an error of the system as a sentence with a remedy, and any other error as its own text, or its type."""
    if isinstance(error, UnicodeError):
        encoding = getattr(error, "encoding", "the encoding")
        if isinstance(error, UnicodeDecodeError):
            return f"a text that is read is not in {encoding} (byte {error.start}); write it in {encoding}, or set PYTHONIOENCODING"
        return f"a text holds what {encoding} cannot hold; write it in UTF-8, or set PYTHONIOENCODING=utf-8"
    asked = _NO_MEMORY.search(str(error))
    if asked is not None or isinstance(error, MemoryError):
        size = f" for {int(asked[1]) / 1e9:,.1f} GB" if asked is not None else ""
        return f"this process has no memory left{size}; choose a smaller batch size or sequence length, or a larger machine (or ulimit)"
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    if error.filename is None and error.errno == errno.ENOENT:
        return "the working folder does not exist any more; change to another one"
    name = "what is written" if error.filename is None else str(error.filename)
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
    if error.errno in _OF_PATHS:
        return f"{name} {_OF_PATHS[error.errno]}"
    return f"{name}: {error.strerror}" if error.filename else str(error.strerror)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, and what follows its colon; the error's type where the text is no sentence."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return name
    text = lines.pop(0)
    while text.endswith(":") and lines:
        text += f" {lines.pop(0)}"
    return f"{name}: {text}" if isinstance(error, LookupError) else text
