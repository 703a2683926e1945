# SPDX-License-Identifier: Apache-2.0
"""The user's cache: folders that are kept between runs, and trusted only where no other user can have written to them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import huggingface_hub.constants


CACHE_VARIABLE = "OPTIMUM_NEURON_CACHE"


def cache_root() -> Path:
    """Return OPTIMUM_NEURON_CACHE, or else a folder in the Hub's home; it need not exist."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(huggingface_hub.constants.HF_HOME) / "optimum_neuron")


def cache_folder(kind: str) -> Path:
    """Return a folder below `cache_root` that is kept between runs, made if need be.

    Its contents run as native code, or are trusted: it has to belong to this user or to root, and no other user may write to it.

    Raises:
        OSError: it cannot be made.
        PermissionError: it is not to be trusted.
    """
    root = cache_root()
    for folder in (root, root / kind):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"the compile cache {folder} cannot be made ({error.strerror}); set {CACHE_VARIABLE} to a folder of your own"
            ) from error
        problem = untrusted(folder.stat())
        if problem:
            raise PermissionError(
                f"the compile cache {folder} {problem}, and this process would run what it holds; set {CACHE_VARIABLE} to "
                f"a folder that only you can write to, or make this one so if you trust its files"
            )
    return root / kind


def untrusted(status: os.stat_result) -> str | None:
    """Return why a file or folder is not to be trusted, or None."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return "is a link, which may lead out of the cache"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be changed by other users"
    return None
