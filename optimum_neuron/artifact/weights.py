# SPDX-License-Identifier: Apache-2.0
"""Weights of an artifact: one safetensors file, mapped once its digest is checked; and the memory of its states."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np

from ..arrays import DTYPES
from ..step.spec import TensorSpec
from ..step.state_specs import byte_count
from .artifact import WEIGHTS_FOLDER, WEIGHTS_NAME, Artifact, ArtifactError
from .filesystem import is_local
from .pages import copied, mapped, zeroed
from .tensor_file import StoredTensor, parse_head, read_head, stored_tensors, view_tensors
from .user_cache import read_verified


if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Place = tuple[int, int | torch.SymInt, torch.Size, tuple[int, ...]]

_ALIGNMENT = 64
_SMALL = 1 << 16
_FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))  # of codes, scales say what they stand for
# Decoding from pages of 4 KB takes up to a fifth longer than from huge ones; the larger the weights, the less does it matter,
# and the more does a copy cost.
_LARGEST_COPY = 1 << 30
_Stored = TypeVar("_Stored")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers under the names that its step graphs use, tied ones under every name."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors as `named_tensors` has them, each once; and the tied names: alias to stored name."""
    stored: dict[Place, str] = {}
    unique, tied = {}, {}
    for name, tensor in tensors.items():
        key = place(tensor)
        if tensor.numel() and key in stored:
            tied[name] = stored[key]
        else:
            stored[key] = name
            unique[name] = tensor
    return unique, tied


def place(tensor: Tensor) -> Place:
    """Return the storage of a tensor, also of the meta device, and how the tensor lies in it: equal for tied tensors."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())


def write_weights(tensors: dict[str, Tensor], folder: Path) -> dict[str, str]:
    """Write `weights/model.safetensors`; return the tied names: alias to stored name; raise OSError where it cannot be written."""
    unique, tied = untie(tensors)
    # Stable: within a type, tensors stand in the order of the model, in which steps read them.
    names = sorted(unique, key=lambda name: -unique[name].dtype.itemsize)
    described = [(name, unique[name].dtype, tuple(unique[name].shape)) for name in names]
    from .weight_file import write_tensor_files  # imports torch, as whoever has tensors to write does

    write_tensor_files([folder / WEIGHTS_NAME], described, lambda name, _: unique[name])
    return tied


def rank_weights_name(rank: int, world_size: int) -> str:
    return WEIGHTS_NAME if world_size == 1 else f"{WEIGHTS_FOLDER}/tp{rank}.safetensors"


def read_weights(artifact: Artifact) -> dict[str, np.ndarray]:
    """Return the tensors of an artifact's one file of weights by name, with tied names, as views of one block of memory.

    The block is the mapped file: processes share it, and a write to a tensor stays in its process. A file of up to 1 GiB is copied to huge
    pages, and so is one that other machines may write to.

    Raises:
        ArtifactError: the file was changed, or is no safetensors file, or lacks a tied weight, or a small tensor holds NaN or infinity.
    """
    path = artifact.file(WEIGHTS_NAME)
    with path.open("rb") as file:
        memory, digest = _read_contents(file, artifact.sha256(WEIGHTS_NAME))
    artifact.check_digest(WEIGHTS_NAME, digest)
    head = read_head(memory, path)
    tensors = view_tensors(np.frombuffer(memory, np.uint8)[len(head) :], parse_head(head, path))
    # The export looks at all of them; to do so again would read a large file whole.
    for name, tensor in tensors.items():
        if tensor.nbytes <= _SMALL and tensor.dtype in _FLOATS and not np.isfinite(tensor).all():
            count = tensor.size - np.count_nonzero(np.isfinite(tensor))
            raise ArtifactError(
                f"{path}: {name} holds NaN or infinity in {count:,} of {tensor.size:,} places; export the model again"
            )
    return _with_tied(tensors, artifact)


def _read_contents(file: BinaryIO, expected: str) -> tuple[mmap, str]:
    """Return all bytes of a file, and their sha256."""
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    if size and is_local(descriptor):
        small = size <= _LARGEST_COPY
        return read_verified(descriptor, lambda: copied(file, size) if small else mapped(descriptor, size), expected)
    memory = copied(file, size)
    return memory, hashlib.sha256(memoryview(memory)[:size]).hexdigest()


def read_layout(artifact: Artifact) -> dict[str, StoredTensor]:
    """Return type and shape of every tensor that `read_weights` returns; raise ArtifactError as that."""
    return _with_tied(stored_tensors(artifact.file(WEIGHTS_NAME)), artifact)


def _with_tied(tensors: dict[str, _Stored], artifact: Artifact) -> dict[str, _Stored]:
    path = artifact.path / WEIGHTS_NAME
    for alias, stored in artifact.tied_weights.items():
        if stored not in tensors:
            raise ArtifactError(f"{path} lacks {stored}, which the manifest ties weights to; export the model again")
        if alias in tensors:
            raise ArtifactError(f"{path} holds {alias}, which the manifest ties to {stored}; export the model again")
    return tensors | {alias: tensors[stored] for alias, stored in artifact.tied_weights.items()}


def check_memory(specs: Sequence[TensorSpec]) -> None:
    """Raise ValueError where states are larger than all memory of this machine."""
    needed = byte_count(specs)
    memory = _machine_memory()
    if needed > memory:
        raise ValueError(
            f"the artifact's KV cache takes {needed / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory; export "
            f"with a smaller batch_size, sequence_length, kv_cache_tokens or state_snapshots"
        )


def _machine_memory() -> int:
    """Return bytes of memory and swap, or all that a process can address where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))


def allocate_states(specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Return zeroed KV state tensors by name, in one block; raise ValueError where they exceed this machine's memory."""
    check_memory(specs)
    dtypes = [np.dtype(spec.dtype) for spec in specs]
    sizes = [math.prod(spec.shape) * dtype.itemsize for spec, dtype in zip(specs, dtypes, strict=True)]
    *starts, end = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    block = np.frombuffer(zeroed(end), np.uint8)
    return {
        spec.name: block[start : start + size].view(dtype).reshape(spec.shape)
        for spec, dtype, size, start in zip(specs, dtypes, sizes, starts, strict=True)
    }
