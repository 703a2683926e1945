# SPDX-License-Identifier: Apache-2.0
"""What a request says of how its tokens are chosen, as keywords of `generate`. Imports no torch."""

from __future__ import annotations

from typing import Any


def sampling_keywords(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> dict[str, Any]:
    """Keywords for what is given; what is None stays as the artifact's defaults have it.

    A temperature of 0 takes the best token. Another temperature draws, and so does each of the others that narrows a draw.
    """
    if temperature == 0:
        return {"do_sample": False}
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    narrows = bool(top_k) or (top_p is not None and top_p < 1) or bool(min_p)
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return given | ({"do_sample": True} if temperature is not None or narrows else {})
