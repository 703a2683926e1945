# SPDX-License-Identifier: Apache-2.0
"""Weights of an artifact: written with safetensors, read into one block of memory while their digest is checked."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .artifact import WEIGHTS_FOLDER, WEIGHTS_NAME, Artifact, ArtifactError
from .graphs.spec import TensorSpec


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_ALIGNMENT = 64
_PIECE = 8 << 20


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers of a model under the names that its step graphs use, tied ones under every name."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def write_weights(tensors: dict[str, Tensor], folder: Path) -> dict[str, str]:
    """Writes `weights/model.safetensors`; returns the tied names: alias to stored name."""
    stored: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    unique, tied = {}, {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in stored:
            tied[name] = stored[key]
        else:
            stored[key] = name
            unique[name] = tensor.contiguous()
    save_file(unique, folder / WEIGHTS_NAME)
    (folder / WEIGHTS_NAME).chmod(0o644)  # safetensors keeps the file to its owner; a server may run as another user
    return tied


def rank_weights_name(rank: int, world_size: int) -> str:
    """The manifest name of one rank's weights."""
    return WEIGHTS_NAME if world_size == 1 else f"{WEIGHTS_FOLDER}/tp{rank}.safetensors"


def read_weights(artifact: Artifact, name: str = WEIGHTS_NAME) -> dict[str, Tensor]:
    """All tensors of a file of weights by name, tied names included, as views of one block of memory.

    Raises:
        ArtifactError: the file was changed, or is no safetensors file.
    """
    path = artifact.file(name)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        head = file.read(8)
        length = int.from_bytes(head, "little")
        size = path.stat().st_size - 8 - length
        if size < 0:
            raise ArtifactError(
                f"{path} is no safetensors file: its header claims {length:,} bytes; export the model again"
            )
        header = file.read(length)
        digest.update(head + header)
        block = _allocate(size)
        view = memoryview(block.numpy().data)[:size]
        for start in range(0, size, _PIECE):
            piece = view[start : start + _PIECE]
            file.readinto(piece)
            digest.update(piece)
    artifact.check_digest(name, digest.hexdigest())
    tensors = _views(path, json.loads(header), block[:size])
    lacking = next((stored for stored in artifact.tied_weights.values() if stored not in tensors), None)
    if lacking is not None:
        raise ArtifactError(f"{path} lacks {lacking}, which the manifest ties weights to; export the model again")
    return tensors | {alias: tensors[stored] for alias, stored in artifact.tied_weights.items()}


def allocate_states(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Zeroed KV state tensors by name, in one block."""
    dtypes = [getattr(torch, spec.dtype) for spec in specs]
    sizes = [_aligned(math.prod(spec.shape) * dtype.itemsize) for spec, dtype in zip(specs, dtypes, strict=True)]
    block, states, start = _allocate(sum(sizes)), {}, 0
    for spec, dtype, size in zip(specs, dtypes, sizes, strict=True):
        used = math.prod(spec.shape) * dtype.itemsize
        states[spec.name] = block[start : start + used].view(dtype).view(spec.shape)
        start += size
    return states


def _allocate(size: int) -> Tensor:
    """Zeroed bytes on huge pages where the system has them: fewer TLB misses when every weight is read each step."""
    block = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)[:size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(path: Path, header: dict, block: Tensor) -> dict[str, Tensor]:
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        start, stop = entry["data_offsets"]
        if dtype is None or not 0 <= start <= stop <= len(block):
            raise ArtifactError(
                f"{path}: tensor {name} of type {entry['dtype']} cannot be read; export the model again"
            )
        tensors[name] = _view(block[start:stop], dtype).view(entry["shape"])
    return tensors


def _view(piece: Tensor, dtype: torch.dtype) -> Tensor:
    # safetensors packs tensors of falling alignment, so only an odd-sized neighbour can leave one unaligned.
    return piece.view(dtype) if piece.storage_offset() % dtype.itemsize == 0 else piece.clone().view(dtype)
