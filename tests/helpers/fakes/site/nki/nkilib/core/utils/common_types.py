# SPDX-License-Identifier: Apache-2.0
"""What kernels are asked for by name."""

from __future__ import annotations

from enum import Enum


class QuantizationType(Enum):
    NONE = 0
    STATIC = 1


class ExpertAffinityScaleMode(Enum):
    NO_SCALE = 0
    POST_SCALE = 1
