# SPDX-License-Identifier: Apache-2.0
"""How every benchmark ends: a plot, a file, and one line of JSON. Measures nothing and needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path


def warn(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"warning: {message}\n")


def publish(text: str, draw: Callable[[], None], file: Path | None) -> None:
    """Draws the plot, where matplotlib is, and prints the results as the last line of stdout.

    Args:
        text: a JSON object on one line.
        file: where to write it as well, indented.
    """
    try:
        draw()
    except ImportError:
        warn("no plot: pip install matplotlib")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(json.loads(text), indent=2) + "\n", encoding="utf-8")
    print(text, flush=True)
