# SPDX-License-Identifier: Apache-2.0
"""Tensors as kernels see them: without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class NkiTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: Any
    buffer: str
