# SPDX-License-Identifier: Apache-2.0
"""The first request of a slot takes what later ones take: warm-up takes the memory of all states."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import artifact_runner, export_tiny


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) of other systems answers otherwise")
def test_warm_up_takes_the_memory_of_every_slot(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sizes = {"batch_size": 128, "sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 8}
    runner = artifact_runner(export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", **sizes))
    states: dict[str, np.ndarray] = runner.executable._states  # type: ignore[attr-defined]
    assert not all(resident_pages(state) for state in states.values())
    runner.warm_up()
    assert all(resident_pages(state) for state in states.values())
    assert not any(state[:-1].any() for state in states.values())


def resident_pages(array: np.ndarray) -> bool:
    """Return whether each page that lies within an array is in memory."""
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (array.ctypes.data + array.nbytes - begin) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * count)()
    place, size = ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(place, size, flags) == 0
    return all(flag & 1 for flag in flags)
