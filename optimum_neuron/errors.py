# SPDX-License-Identifier: Apache-2.0
"""What errors of other libraries become in a message of one line. Imports nothing of the project."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of what an error says, and what follows its colon; its type where that is all or no sentence."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return name
    text = lines.pop(0)
    while text.endswith(":") and lines:
        text += f" {lines.pop(0)}"
    return f"{name}: {text}" if isinstance(error, LookupError) else text
