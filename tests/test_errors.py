# SPDX-License-Identifier: Apache-2.0
"""What other libraries' errors become in a sentence."""

from __future__ import annotations

import pytest

from optimum_neuron.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \n"), "one"),
        (ValueError("it fails:\n    at its end:\n  here\nnot here"), "it fails: at its end: here"),
        (ValueError("it fails:"), "it fails:"),
        (RuntimeError(), "RuntimeError"),
        (AssertionError(" \n "), "AssertionError"),
        (KeyError("name"), "KeyError: 'name'"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
    ],
)
def test_an_error_is_one_line_that_says_something(error: Exception, line: str) -> None:
    assert first_line(error) == line
