# SPDX-License-Identifier: Apache-2.0
"""Digests of files. Imports nothing of the project."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
