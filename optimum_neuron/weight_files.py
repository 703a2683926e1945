# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint's weights, looked at before they are read: whole, and of a kind that runs no code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open


SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")


def check_weight_files(folder: Path, source: str) -> None:
    """Raises where a folder does not hold all of a checkpoint's weights as safetensors.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        ValueError: a file is truncated or corrupt, or the weights are pickled.
    """
    if (folder / SINGLE_NAME).is_file():
        names: Iterable[str] = [SINGLE_NAME]
    elif (folder / INDEX_NAME).is_file():
        names = _indexed(folder / INDEX_NAME)
    else:
        _refuse_without_safetensors(folder, source)
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{source} lacks {name}, which {INDEX_NAME} names; download or copy it again")
        check_safetensors(folder / name)


def check_safetensors(path: Path) -> None:
    """Raises ValueError where the file's size and its header contradict each other."""
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path} is truncated or corrupt ({size:,} bytes: {error}); download or copy it again"
        ) from error


def _indexed(path: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights ({error!r}); download or copy it again") from error
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{path} names {outside!r}, which is no file beside it; do not use this checkpoint")
    return names


def _refuse_without_safetensors(folder: Path, source: str) -> None:
    pickled = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{source} holds its weights as {pickled[0]}, a format that may run code; convert it to {SINGLE_NAME} by "
            f"transformers: from_pretrained(...).save_pretrained(...)"
        )
    raise FileNotFoundError(f"{source} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}")
