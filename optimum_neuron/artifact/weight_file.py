# SPDX-License-Identifier: Apache-2.0
"""Files of weights, written tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import progress
from ..arrays import dtype_name
from ..checkpoints.mapped import give_back
from ..parity.nonfinite import nonfinite
from .tensor_file import file_head, tensor_bytes


Described = tuple[str, torch.dtype, tuple[int, ...]]


def write_tensor_files(
    paths: Sequence[Path], tensors: Sequence[Described], make: Callable[[str, int], Tensor]
) -> None:
    """Write safetensors files with tensors of the same names, types and shapes, in the order of `tensor_file.file_head`.

    `make` returns the tensor of a name and the number of a file; it is called for all files before the next name.
    Raises OSError with the file's name if it cannot be written; ValueError if a tensor holds NaN or infinity.
    """
    head = file_head((name, np.dtype(dtype_name(dtype)), shape) for name, dtype, shape in tensors)
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
    with ExitStack() as stack:
        files = [stack.enter_context(_open_file(path)) for path in paths]
        for file in files:
            file.write(head)
        advance = stack.enter_context(progress.stage("Writing", sum(sizes) * len(files)))
        for (name, _, _), size in zip(tensors, sizes, strict=True):
            for number, file in enumerate(files):
                tensor = make(name, number)
                problem = nonfinite(name.removeprefix("model."), tensor)
                if problem:
                    raise ValueError(problem)
                file.write(tensor_bytes(tensor))
                give_back(tensor)
                advance(name, size)


@contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write; an error names it, which that of a write does not."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
