# SPDX-License-Identifier: Apache-2.0
"""The fake NEFF: a header of 1024 bytes, as real ones have, and the HLO instead of instructions."""

from __future__ import annotations

import json


HEADER = 1024
MAGIC = "fake NEFF"


def pack(hlo: bytes, target: str, lnc: int) -> bytes:
    header = json.dumps({"format": MAGIC, "target": target, "lnc": lnc}).encode()
    return header.ljust(HEADER) + hlo


def unpack(data: bytes) -> tuple[dict, bytes]:
    """Header and HLO; RuntimeError as the runtime raises it where the bytes are no NEFF."""
    try:
        header = json.loads(data[:HEADER])
    except ValueError:
        header = {}
    if header.get("format") != MAGIC or len(data) <= HEADER:
        raise RuntimeError("NRT Error NRT_INVALID(2): Failed to load model")
    return header, data[HEADER:]
