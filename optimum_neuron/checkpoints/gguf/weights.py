# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GGUF file, plain or as blocks, under the names and in the row order of a transformers model.

Names are those of gguf's own table, which llama.cpp's converter uses; a change here undoes a change of the converter. A recipe that reorders
rows, such as those of a Llama's queries, is applied to the rows' numbers to find the order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...step.features.codes.weight import QuantizedWeight
from ..formats.format import CheckpointFormat
from ..formats.stored import PLAIN_REMEDY, NotKeptError
from ..mapped import in_file
from .blocks import KINDS, repack
from .header import PLAIN_KINDS, GgufHeader
from .keys import REMEDY


Make = Callable[..., np.ndarray]
# Tables that llama.cpp and transformers compute themselves.
_COMPUTED = ("attn_rot_embd.weight", "rotary_emb.inv_freq")
_MARKED_COLUMNS = 2
_TRANSPOSED = r"(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight"


@dataclass(frozen=True)
class Recipe:
    """A way to make a parameter from tensors of the file, `[..., outputs, inputs]` each; with `is_transposed` it has inputs before outputs.

    A function `make` that only moves rows takes any number of inputs.
    """

    tensors: tuple[str, ...]
    make: Make
    is_transposed: bool = False


def recipes(model: PreTrainedModel, architecture: str) -> dict[str, Recipe]:
    """Return recipes by parameter, none without a tensor of this architecture; raise RuntimeError where the installed gguf is too old."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise RuntimeError(f"this gguf does not know the architecture {architecture}; pip install --upgrade gguf")
    known = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    found: dict[str, Recipe] = {}
    for name in stored_names(model):
        made = _joined_recipe(name, architecture, model.config)
        if made is None:
            module, _, own = name.rpartition(".")
            if own not in ("weight", "bias"):
                module, own = name, "weight"
            # gguf knows some modules only by names without the first part.
            tensor = known.get_name(module) or known.get_name(module.partition(".")[2])
            made = None if tensor is None else _changed_recipe(f"{tensor}.{own}", architecture, model.config)
        if made is not None:
            found[name] = made
    return found


def stored_names(model: PreTrainedModel) -> list[str]:
    """Return the names of a checkpoint's tensors; of tied ones the first."""
    kept = model.state_dict().keys()
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in kept]


def _changed_recipe(tensor: str, architecture: str, config: PreTrainedConfig) -> Recipe:
    own = re.sub(r"^blk\.\d+\.", "", tensor)
    found = (each for kinds, names, each in CHANGES if architecture in kinds and re.fullmatch(names, own))
    is_transposed = architecture == "gpt2" and re.fullmatch(_TRANSPOSED, own) is not None
    return Recipe((tensor,), next(found, lambda _: _as_it_is)(config), is_transposed)


def _as_it_is(values: np.ndarray) -> np.ndarray:
    return values


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of rotated pairs as the two halves of each head."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _grouped(values: np.ndarray, heads: int, of_keys: int) -> np.ndarray:
    """Return all queries, keys and values as groups: the queries of a key, it and its value."""
    size = values.shape[0] // (heads + 2 * of_keys)
    rest = values.shape[1:]
    queries = values[: heads * size].reshape(of_keys, -1, size, *rest)
    others = values[heads * size :].reshape(2, of_keys, 1, size, *rest)
    return np.concatenate((queries, others[0], others[1]), 1).reshape(values.shape)


def _mixed(values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """Return queries and keys as they are, and the values of heads together."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate((values[:first], _heads_together(values[first:], config)))


def _heads_together(values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    return _together(values, config.linear_num_key_heads, config.linear_value_head_dim)


def _together(values: np.ndarray, heads: int, size: int = 1) -> np.ndarray:
    """Return heads of values grouped by their head of keys; llama.cpp has the first of each head of keys, then the second."""
    return values.reshape(-1, heads, size, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _joined_recipe(name: str, architecture: str, config: PreTrainedConfig) -> Recipe | None:
    """Return the recipe of a parameter that the file has in several tensors, or as a part of one."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return None
    block, own = f"blk.{layer[1]}.", name[layer.end() :]
    if experts := re.fullmatch(r".*\.experts\.(gate_up|down)_proj(_bias)?", own):
        is_oss, kind = architecture == "gpt-oss", "bias" if experts[2] else "weight"
        joined = _interleaved if is_oss else lambda gates, ups: np.concatenate((gates, ups), 1)
        make = _as_it_is if experts[1] == "down" else joined
        tensors = tuple(f"{block}ffn_{part}_exps.{kind}" for part in experts[1].split("_"))
        return Recipe(tensors, make, is_oss and kind == "weight")
    if own.endswith("e_score_correction_bias"):
        return Recipe((f"{block}exp_probs_b.bias",), _as_it_is)
    if norm := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight", own):
        return Recipe((f"{block}attn_{norm[1]}_norm.weight",), lambda values: values[int(norm[2])])
    linear = {"linear_attn.A_log": f"{block}ssm_a", "linear_attn.dt_bias": f"{block}ssm_dt.bias"}
    if own in linear:
        return _changed_recipe(linear[own], architecture, config)
    if own == "self_attn.kv_b_proj.weight":
        return Recipe((f"{block}attn_k_b.weight", f"{block}attn_v_b.weight"), _keys_and_values)
    return None


def _interleaved(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """Return `[experts, 2 * outputs, ...]`: a gate, then its projection up."""
    return np.stack((gates, ups), 2).reshape(gates.shape[0], -1, *gates.shape[2:])


def _keys_and_values(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return `[heads * (keys + values), rank]` of `[heads, rank, keys]` and `[heads, values, rank]`."""
    joined = np.concatenate((keys.swapaxes(1, 2), values), 1)
    return joined.reshape(-1, joined.shape[-1])


_LINEAR = ("qwen35", "qwen35moe")
# Functions that undo the converter's changes: architectures, tensors by their names in a block, a function of the config. The first counts.
CHANGES: tuple[tuple[tuple[str, ...], str, Callable[[Any], Make]], ...] = (
    # llama.cpp has norms with the 1 that transformers adds.
    (("gemma", "gemma2", "gemma3", "nemotron", *_LINEAR), r"(?!ssm_).*norm\.weight", lambda _: lambda values: values - 1),
    # Rotated pairs are neighbours in a file, and halves of a head in transformers.
    (("llama", "granite"), r"attn_q\..*", lambda config: partial(_halves, heads=config.num_attention_heads)),
    (("llama", "granite"), r"attn_k\..*", lambda config: partial(_halves, heads=config.num_key_value_heads)),
    (("bloom",), r"attn_qkv\..*", lambda config: partial(_grouped, heads=config.n_head, of_keys=config.n_head)),
    (("falcon",), r"attn_qkv\..*", lambda config: partial(
        _grouped, heads=config.num_attention_heads, of_keys=1 if config.multi_query else config.num_kv_heads
    )),
    (_LINEAR, r"ssm_a", lambda config: lambda values: np.log(-_together(values, config.linear_num_key_heads))),
    (_LINEAR, r"ssm_(?:alpha|beta)\.weight|ssm_dt\.bias", lambda config: partial(_together, heads=config.linear_num_key_heads)),
    (_LINEAR, r"attn_gate\.weight", lambda config: partial(_heads_together, config=config)),
    (_LINEAR, r"(?:attn_qkv|ssm_conv1d)\.weight", lambda config: partial(_mixed, config=config)),
    (_LINEAR, r"ssm_out\.weight", lambda config: lambda values: _heads_together(values.swapaxes(0, 1), config).swapaxes(0, 1)),
)  # fmt: skip


class GgufFile(CheckpointFormat):
    """A GGUF file, by the names of a model's parameters."""

    def __init__(self, header: GgufHeader, model: PreTrainedModel) -> None:
        """Find the tensors of each parameter of a model, which may be without memory."""
        self._header = header
        self._path = header.path
        self._class = type(model).__name__
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._made = recipes(model, header.architecture)
        self._recipes = {name: made for name, made in self._made.items() if header.tensors.keys() >= {*made.tensors}}
        self._wanted = stored_names(model)
        coded = {name for name, recipe in self._recipes.items() if set(self._kinds(recipe)) - set(PLAIN_KINDS)}
        self.layers = tuple(name for name in self._recipes if name in coded)
        self.plain = tuple(name for name in self._recipes if name not in coded)

    def check_accounted(self, known: frozenset[str]) -> None:
        """Raise ValueError for a file that lacks a parameter, or holds a tensor without a use; `known` are those of the config."""
        lacking = next((name for name in self._wanted if name not in self._recipes), None)
        if lacking is not None:
            tensors = self._made[lacking].tensors if lacking in self._made else (lacking,)
            absent = next((each for each in tensors if each not in self._header.tensors), lacking)
            raise ValueError(
                f"{self._path} lacks the tensor {absent}, which {self._class} needs; download the file again, or convert it again"
            )
        used = {tensor for recipe in self._recipes.values() for tensor in recipe.tensors} | known
        left = [name for name in self._header.tensors if name not in used and not name.endswith(_COMPUTED)]
        if left:
            more = f" and {len(left) - 1} more tensors" if len(left) > 1 else ""
            raise ValueError(f"{self._path} holds {left[0]}{more}, for which {self._class} has no place; {REMEDY}")

    def read_codes(self, name: str) -> QuantizedWeight:
        recipe = self._recipes[name]
        kinds = self._kinds(recipe)
        other = sorted(set(kinds) - KINDS.keys())
        if other:
            raise NotKeptError(
                f"{self._path}: {name} has the type {other[0]}, which holds no codes times scales; {PLAIN_REMEDY}"
            )
        places = self._row_places(recipe)
        if places is None:
            raise NotKeptError(f"{self._path}: {name} is no tensor of the file with rows reordered; {PLAIN_REMEDY}")
        weights = [
            repack(f"{self._path}: {tensor}", kind, torch.from_numpy(np.array(self._header.read_bytes(tensor))))
            for tensor, kind in zip(recipe.tensors, kinds, strict=True)
        ]
        alike = {(weight.kind, weight.scale.dtype, weight.group_size, weight.shift is None) for weight in weights}
        if len(alike) != 1:
            raise NotKeptError(f"{self._path}: {name} is made of tensors of types {', '.join(kinds)}; {PLAIN_REMEDY}")
        if len(weights) == 1 and torch.equal(places.flatten(), torch.arange(places.numel())):
            return weights[0]

        def placed(part: str) -> Tensor:
            return torch.cat([getattr(weight, part).flatten(0, -2) for weight in weights])[places]

        shift = None if weights[0].shift is None else placed("shift")
        return replace(weights[0], codes=placed("codes"), scale=placed("scale"), shift=shift)

    def dequantize(self, name: str) -> Tensor:
        """Return a parameter by gguf's own function; raise ValueError where the file's tensors have other shapes."""
        recipe = self._recipes[name]
        values = [self._header.read_values(tensor) for tensor in recipe.tensors]
        try:
            made = recipe.make(*values)
        except (ValueError, IndexError) as error:
            raise self._wrong_shape(name) from error
        made = made.swapaxes(-1, -2) if recipe.is_transposed else made
        if [size for size in made.shape if size > 1] != [size for size in self._shapes[name] if size > 1]:
            raise self._wrong_shape(name)
        return torch.from_numpy(np.ascontiguousarray(made.reshape(self._shapes[name])))

    def read_plain(self, name: str) -> Tensor:
        return in_file(self.dequantize(name))

    def _wrong_shape(self, name: str) -> ValueError:
        tensors = {tensor: list(self._header.tensors[tensor].shape) for tensor in self._recipes[name].tensors}
        shapes = " and ".join(f"{tensor} of the shape {shape}" for tensor, shape in tensors.items())
        return ValueError(
            f"{self._path} has {shapes}, and {self._class} makes {name} of the shape {list(self._shapes[name])} of it; download or "
            f"convert the file again"
        )

    def _kinds(self, recipe: Recipe) -> list[str]:
        return [self._header.kind(tensor) for tensor in recipe.tensors]

    def _row_places(self, recipe: Recipe) -> Tensor | None:
        """Return `[..., outputs]` int64: places of rows among the rows of the tensors; None where they are not made of all these, as they are."""
        marks, first = [], 0
        for tensor in recipe.tensors:
            shape = self._header.tensors[tensor].shape[:-1]
            rows = int(np.prod(shape))
            numbers = np.arange(first * _MARKED_COLUMNS, (first + rows) * _MARKED_COLUMNS, dtype=np.float64)
            marks.append(numbers.reshape(*shape, _MARKED_COLUMNS))
            first += rows
        try:
            made = recipe.make(*marks)
        except (ValueError, IndexError):  # the shape depends on the number of inputs
            return None
        if made.shape[-1:] != (_MARKED_COLUMNS,) or not np.array_equal(made[..., 0] + 1, made[..., 1]):
            return None
        places = torch.from_numpy(np.array(made[..., 0] / _MARKED_COLUMNS)).long()
        whole = torch.equal(places.flatten().sort().values, torch.arange(first))
        return places if whole else None
