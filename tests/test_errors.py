# SPDX-License-Identifier: Apache-2.0
"""What other libraries' errors become in a sentence."""

from __future__ import annotations

import errno

import pytest

from optimum_neuron.errors import explain_error, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"), (ValueError("\n  one  \n"), "one"),
        (ValueError("it fails:\n    at its end:\n  here\nnot here"), "it fails: at its end: here"),
        (ValueError("it fails:"), "it fails:"), (RuntimeError(), "RuntimeError"),
        (AssertionError(" \n "), "AssertionError"), (KeyError("name"), "KeyError: 'name'"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_something(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("as it is"), "as it is"), (ValueError(), "ValueError"), (OSError("as it is"), "as it is"),
        (OSError(errno.ENOENT, "No such file", "a.csv"), "a.csv does not exist; check the name"),
        (OSError(errno.ENOENT, "No such file"), "the working folder does not exist any more; change to another one"),
        (OSError(errno.EFBIG, "File too large"), "what is written becomes larger than a file may be here (ulimit -f); raise the limit"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 999), f"{'x' * 300}… cannot be there: File name too long"),
        (OSError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (OSError(errno.EIO, "Input/output error", "disk"), "disk: Input/output error"),
        (MemoryError(), "this process has no memory left; choose a smaller batch size or sequence length"),
        (RuntimeError("alloc: can't allocate memory: you tried to allocate 2300000000 bytes. Error 12"), "no memory left for 2.3 GB;"),
        (UnicodeDecodeError("ascii", b"\xc3", 0, 1, "ordinal"), "a text that is read is not in ascii (byte 0); write it in ascii"),
    ],
)  # fmt: skip
def test_an_error_of_the_system_is_a_sentence(error: Exception, sentence: str) -> None:
    assert sentence in explain_error(error)
    assert "[Errno" not in explain_error(error)
