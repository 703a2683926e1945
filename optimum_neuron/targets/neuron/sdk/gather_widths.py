# SPDX-License-Identifier: Apache-2.0
"""The widths of all-gathers that a device is known to compute right or wrong, from public reports.

A narrow one over several devices filled the places of the own device's ranks alone and left the others as they were, without an error.
"""

from __future__ import annotations

from typing import NamedTuple


class GatherReport(NamedTuple):
    """An all-gather of so many float32 numbers of each rank, by ranks on so many devices."""

    target: str
    ranks: int
    devices: int
    width: int
    right: bool
    source: str


_SAMPLING = "longdct/vllm-neuron, docs/model-dev/deepseek-v4-on-device-sampling.md"
REPORTS = (
    GatherReport("trn2", 4, 1, 1, True, _SAMPLING),
    GatherReport("trn2", 8, 2, 1, False, _SAMPLING),
    GatherReport("trn2", 8, 2, 128, False, _SAMPLING),
    GatherReport("trn2", 8, 2, 1024, False, _SAMPLING),
    GatherReport("trn2", 8, 2, 16160, True, _SAMPLING),
)
# aws-neuron/nkipy#52 has wrong tokens of greedy ranks, too, at 1,024, 4,096, 32,768 and 62,080 logits of each of 4 ranks, and right ones at
# 18,992 and 37,984: there an index computed by the device read the gathered tokens. Nothing here reads by such an index.

# The least width that is right on several devices; gathers that decide a token are filled up to it.
LEAST_WIDTH = min(each.width for each in REPORTS if each.right and each.devices > 1)
