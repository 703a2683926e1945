# SPDX-License-Identifier: Apache-2.0
"""Which token ids a model can be given: not always as many as it has logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LookUps(TorchFunctionMode):
    """Notes the tables in which a running model looks a token up.

    Args:
        token: as no position and no type of a token is numbered.

    Attributes:
        rows: of each table.
    """

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is nn.functional.embedding:
            self._note(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _note(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        if torch.equal(input, torch.full_like(input, self._token)):
            self.rows.append(weight.shape[0])
