# SPDX-License-Identifier: Apache-2.0
"""How much of a disk an export takes, and whether it is there."""

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


# Compiled graphs and tokenizer files beside the weights, generously.
_MARGIN = 64 << 20
# By kind of codes; their scales and the weights that stay plain come on top.
_BYTES_OF_A_CODE = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
# transformers joins the weights of experts that a checkpoint has one by one.
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_disk(folder: Path, needed: int) -> None:
    """Raises OSError where a folder's disk has less than so many bytes free, and some more for what goes with weights."""
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise OSError(
            f"the artifact needs about {(needed + _MARGIN) / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; free some space "
            f"or name another folder"
        )


def written_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the file of weights that holds tensors, tied ones once."""
    unique, _ = untie(tensors)
    return sum(tensor.nbytes for tensor in unique.values())


def expected_bytes(checkpoint: Checkpoint, config: NeuronConfig) -> int:
    """At least so many bytes an export of a checkpoint takes at a time, told by the headers of its files; 0 where these do not tell.

    They are those of the artifact, and of what lies in files meanwhile: weights that are cast, joined or rounded to codes.

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
