# SPDX-License-Identifier: Apache-2.0
"""Types by name."""

from __future__ import annotations


bfloat16, float16, float32, int32, uint8 = "bfloat16", "float16", "float32", "int32", "uint8"
