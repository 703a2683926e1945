# SPDX-License-Identifier: Apache-2.0
"""Fake of NKI: compiles no kernel, and says what it was given."""

from __future__ import annotations


class jit:  # noqa: N801  as the package spells it
    """A kernel; its function stays reachable."""

    def __init__(self, func) -> None:
        self.func = func
