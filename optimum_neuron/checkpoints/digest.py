# SPDX-License-Identifier: Apache-2.0
"""Digests of files."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path

from .. import progress


_PIECE = 4 << 20
# From so many bytes on it may take a second or more, and is shown.
_LONG = 256 << 20


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    size = path.stat().st_size
    shown = progress.stage("Hashing", size) if size >= _LONG else nullcontext(None)
    digest = hashlib.sha256()
    with path.open("rb") as file, shown as advance:
        while piece := file.read(_PIECE):
            digest.update(piece)
            if advance is not None:
                advance(path.name, len(piece))
    return digest.hexdigest()
