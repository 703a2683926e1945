# SPDX-License-Identifier: Apache-2.0
"""Tables that a model looks its positions up in: they end, and a text does not go on behind their end."""

from __future__ import annotations

import bisect

from transformers import PreTrainedModel

from ..step.masks import UnsupportedModelError
from .inspect import look_at


def check_tables(model: PreTrainedModel, sequence_length: int) -> None:
    """Has the model look up the last position of its longest text, in tables of positions and of biases.

    Raises:
        ValueError: a table is shorter; the longest text that it has positions for is named.
    """
    if not _lacks(model, sequence_length):
        return
    longest = bisect.bisect(range(1, sequence_length + 1), False, key=lambda length: _lacks(model, length))
    raise ValueError(
        f"{type(model).__name__} cannot be exported with sequence_length={sequence_length}: its table of positions ends at "
        f"{longest} tokens; choose a sequence_length of at most {longest}"
    )


def _lacks(model: PreTrainedModel, length: int) -> bool:
    """Whether a text of that length has no place for its last token."""
    try:
        look_at(model, position=length - 1, sequence_length=length)
    except (IndexError, RuntimeError, UnsupportedModelError):  # a look-up, torch's gather, and a table of biases
        return True
    return False
