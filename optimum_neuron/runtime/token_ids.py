# SPDX-License-Identifier: Apache-2.0
"""Token ids are checked before a graph sees them: it looks them up without a check. Imports no torch."""

from __future__ import annotations

import numpy as np


def check_token_ids(token_ids: np.ndarray, size: int, what: str) -> None:
    """Check token ids of any shape and width.

    Args:
        what: begins the message.

    Raises:
        TypeError: they are no whole numbers.
        ValueError: one is negative or not below `size`.
    """
    if not token_ids.size:
        return
    if token_ids.dtype.kind not in "iu":
        raise TypeError(f"{what} holds {token_ids.dtype} values; give whole numbers from 0 to {size - 1}")
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} has the token id {low if low < 0 else high}, and the model's are 0 to {size - 1}; take ids from its own "
            f"tokenizer"
        )
