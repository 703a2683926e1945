# SPDX-License-Identifier: Apache-2.0
"""Types of weights by the names that a checkpoint's config gives them: one closed table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .mapped import DTYPES


NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_KEYS = ("dtype", "torch_dtype")
_OF_ANOTHER_KIND = "quantization_config"


def check_dtypes(document: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where a config, or one inside of it, names a type that is none.

    Args:
        document: the JSON object of a config.json.
        where: the file, for the message.
    """
    for name, value in document.items():
        if name.endswith("_config") and name != _OF_ANOTHER_KIND and isinstance(value, Mapping):
            check_dtypes(value, where)
        if name in _KEYS and value is not None and not (isinstance(value, str) and value in NAMED):
            raise ValueError(
                f"{where} names {name}={value!r:.60}, which is no type of weights; write one such as 'bfloat16'"
            )
