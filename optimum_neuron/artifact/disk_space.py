# SPDX-License-Identifier: Apache-2.0
"""Disk space that an export takes, checked before it is taken."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.files import read_shapes, weight_files
from ..checkpoints.mapped import DTYPES, NAMED
from ..config import NeuronConfig
from .weights import untie


# More than compiled graphs and tokenizer files take.
_MARGIN = 64 << 20
# Bytes by kind of codes; their scales and the weights that stay plain come on top.
_BYTES_OF_A_CODE = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
# transformers joins the weights of experts that a checkpoint has one by one.
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_disk(folder: Path, needed: int) -> None:
    """Raise OSError where a folder's disk has less than so many bytes free, and a margin for files apart from weights."""
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise OSError(
            f"the artifact needs about {(needed + _MARGIN) / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; free some space "
            f"or name another folder"
        )


def written_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the file of weights with these tensors, tied ones once."""
    unique, _ = untie(tensors)
    return sum(tensor.nbytes for tensor in unique.values())


def expected_bytes(checkpoint: Checkpoint, config: NeuronConfig) -> int:
    """Return a lower bound of the bytes that an export takes at a time, from the headers of its files; 0 where they are not enough.

    It counts the artifact, and files with weights that are cast, joined or rounded to codes meanwhile.

    Raises:
        FileNotFoundError: there are no weights, or a file of them is missing.
        ValueError: a file is truncated or corrupt, or the weights are pickled.
    """
    if not checkpoint.is_plain:
        return 0
    dtype = checkpoint.resolve_dtype(checkpoint.load_config(), config.dtype)
    written = meanwhile = 0.0
    for path in weight_files(checkpoint.folder, checkpoint.source):
        for name, (shape, stored) in read_shapes(path).items():
            own = DTYPES.get(stored)
            if own is None or not own.is_floating_point:
                continue
            made = own if dtype is None else NAMED[dtype]
            code = _BYTES_OF_A_CODE.get(config.quantization or "") if len(shape) > 1 else None
            written += math.prod(shape) * (code or made.itemsize)
            if made != own or _OF_ONE_EXPERT.search(name):
                meanwhile += math.prod(shape) * made.itemsize
            if code is not None:
                meanwhile += math.prod(shape) * code
    return int(written + meanwhile)
