# SPDX-License-Identifier: Apache-2.0
"""The backend that records which recurrences layers keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .recurrence import RecurrenceBackend, ScanCall, ScanKind


class RecurrenceRecorder(RecurrenceBackend):
    """A recurrence backend that only records which states layers keep."""

    def __init__(self, found: list[Any], make_state: Callable[..., Any]) -> None:
        super().__init__()
        self._found, self._make_state = found, make_state

    def scan(self, kind: ScanKind, call: ScanCall) -> Tensor:
        sizes = call.heads, call.key.shape[2], call.value.shape[2], call.width
        self._found.append(self._make_state(*self.number_scan(), *sizes))
        return torch.zeros_like(call.value)
