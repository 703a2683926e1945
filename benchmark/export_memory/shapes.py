# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of random weights in published shapes, written tensor by tensor."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_neuron.artifact.tensor_file import file_head, tensor_bytes


_SHARD_BYTES = 5_000_000_000
_COMMON: dict[str, Any] = {
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
# Of Llama 3.2 and 3.1.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Bytes of a checkpoint's tensors: of all together, and of the largest."""

    total: int
    largest: int


def write_checkpoint(shape: str, dtype: torch.dtype, folder: Path) -> Sizes:
    """Writes safetensors files of up to 5 GB, their index and a config.

    Args:
        folder: is made.

    Raises:
        OSError: the disk has no room for it.
    """
    config = LlamaConfig(**_COMMON, **SHAPES[shape], dtype=dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sizes = {name: math.prod(each) * dtype.itemsize for name, each in tensors.items()}
    folder.mkdir(parents=True)
    free = shutil.disk_usage(folder).free
    if free < sum(sizes.values()):
        raise OSError(
            f"the checkpoint takes {sum(sizes.values()) / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; free some space or "
            f"name another folder"
        )
    config.save_pretrained(folder)
    generator, files = torch.Generator().manual_seed(0), _files(sizes)
    for number, names in enumerate(files, 1):
        with (folder / _name(number, len(files))).open("wb") as file:
            file.write(file_head((name, dtype, tensors[name]) for name in names))
            for name in names:
                file.write(tensor_bytes(_random(tensors[name], dtype, generator)))
    places = {name: _name(number, len(files)) for number, names in enumerate(files, 1) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return Sizes(sum(sizes.values()), max(sizes.values()))


def _files(sizes: dict[str, int]) -> list[list[str]]:
    files: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if files[-1] and taken + size > _SHARD_BYTES:
            files.append([])
            taken = 0
        files[-1].append(name)
        taken += size
    return files


def _name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Scaled so that activations neither vanish nor overflow; of norms, all ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)
