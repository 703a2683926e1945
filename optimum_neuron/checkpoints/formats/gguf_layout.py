# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a GGUF file a parameter of a transformers model is made of, and how.

Names are those of gguf's own table, which llama.cpp's converter uses; what is done to a tensor undoes what the converter does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel


Make = Callable[..., np.ndarray]
# Norms that llama.cpp has with the 1 that transformers adds.
_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
# Architectures whose rotated pairs are neighbours in a file, and halves of a head in transformers.
_PAIRED = ("llama", "granite")


@dataclass(frozen=True)
class Recipe:
    """How a parameter is made.

    Attributes:
        tensors: names in the file.
        make: takes their numbers, `[..., outputs, inputs]` each; gives those of the parameter, of which a row may be another
            tensor's. It can be called with any number of inputs where it only moves rows.
        is_transposed: whether the parameter has inputs before outputs.
    """

    tensors: tuple[str, ...]
    make: Make
    is_transposed: bool = False


def recipes(model: PreTrainedModel, architecture: str) -> dict[str, Recipe]:
    """By name of a parameter; one that no tensor of this architecture stands for has none.

    Raises:
        RuntimeError: the installed gguf is too old.
    """
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise RuntimeError(
            f"the installed gguf does not know the architecture {architecture}; pip install --upgrade gguf"
        )
    known = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    found: dict[str, Recipe] = {}
    for name in stored_names(model):
        made, tensor = _joined(name, architecture, model.config), _tensor(name, known)
        if made is None and tensor is not None:
            made = Recipe((tensor,), *_changed(tensor, architecture, model.config))
        if made is not None:
            found[name] = made
    return found


def stored_names(model: PreTrainedModel) -> list[str]:
    """The names of what a checkpoint holds; of tensors that are one the first."""
    kept = model.state_dict().keys()
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in kept]


def _tensor(name: str, known: Any) -> str | None:
    """A tensor's name in the file, by a parameter's; gguf knows some modules only by names without the first part."""
    module, _, own = name.rpartition(".")
    if own not in ("weight", "bias"):
        module, own = name, "weight"
    found = known.get_name(module) or known.get_name(module.partition(".")[2])
    return None if found is None else f"{found}.{own}"


def _changed(tensor: str, architecture: str, config: PreTrainedConfig) -> tuple[Any, ...]:
    own = re.sub(r"^blk\.\d+\.", "", tensor)
    if architecture in _SHIFTED and own.endswith("norm.weight") and own != "ssm_norm.weight":
        return (lambda values: values - 1,)
    if architecture in _PAIRED and own.startswith(("attn_q.", "attn_k.")):
        heads = config.num_attention_heads if own.startswith("attn_q.") else config.num_key_value_heads
        return (lambda values: _halves(values, heads),)
    if architecture == "bloom" and own.startswith("attn_qkv."):
        heads = config.num_attention_heads
        return (lambda values: _grouped(values, heads, heads),)
    if architecture == "falcon" and own.startswith("attn_qkv."):
        heads = config.num_attention_heads
        return (lambda values: _grouped(values, heads, 1 if config.multi_query else config.num_kv_heads),)
    if architecture.startswith("qwen35"):
        return (_of_linear_attention(own, config),)
    if architecture == "gpt2" and own in ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"):
        return (_as_it_is, True)
    return (_as_it_is,)


def _as_it_is(values: np.ndarray) -> np.ndarray:
    return values


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotated pairs as the two halves of each head."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _grouped(values: np.ndarray, heads: int, of_keys: int) -> np.ndarray:
    """All queries, all keys and all values as groups: the queries of a key, it and its value."""
    size = values.shape[0] // (heads + 2 * of_keys)
    rest = values.shape[1:]
    queries = values[: heads * size].reshape(of_keys, -1, size, *rest)
    others = values[heads * size :].reshape(2, of_keys, 1, size, *rest)
    return np.concatenate((queries, others[0], others[1]), 1).reshape(values.shape)


def _of_linear_attention(own: str, config: PreTrainedConfig) -> Make:
    """llama.cpp has the first head of values of each head of keys, then the second; transformers has those of a head of keys together."""
    heads, size = config.linear_num_key_heads, config.linear_value_head_dim
    first = 2 * heads * config.linear_key_head_dim
    made: dict[str, Make] = {
        "attn_gate.weight": lambda values: _together(values, heads, size),
        "ssm_alpha.weight": lambda values: _together(values, heads, 1),
        "ssm_beta.weight": lambda values: _together(values, heads, 1),
        "ssm_dt.bias": lambda values: _together(values, heads, 1),
        "ssm_a": lambda values: np.log(-_together(values, heads, 1)),
        "ssm_out.weight": lambda values: _together(values.swapaxes(0, 1), heads, size).swapaxes(0, 1),
        "attn_qkv.weight": lambda values: np.concatenate((values[:first], _together(values[first:], heads, size))),
    }
    return made.get("attn_qkv.weight" if own == "ssm_conv1d.weight" else own, _as_it_is)


def _together(values: np.ndarray, heads: int, size: int) -> np.ndarray:
    return values.reshape(-1, heads, size, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _joined(name: str, architecture: str, config: PreTrainedConfig) -> Recipe | None:
    """A parameter that the file has in several tensors, or a part of one."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return None
    block, own = f"blk.{layer[1]}.", name[layer.end() :]
    kind = "bias" if own.endswith("_bias") else "weight"
    is_oss = architecture == "gpt-oss"
    if re.fullmatch(r".*\.experts\.gate_up_proj(_bias)?", own):
        tensors = (f"{block}ffn_gate_exps.{kind}", f"{block}ffn_up_exps.{kind}")
        return Recipe(tensors, _interleaved if is_oss else _one_after_another, is_oss and kind == "weight")
    if re.fullmatch(r".*\.experts\.down_proj(_bias)?", own):
        return Recipe((f"{block}ffn_down_exps.{kind}",), _as_it_is, is_oss and kind == "weight")
    if own.endswith("e_score_correction_bias"):
        return Recipe((f"{block}exp_probs_b.bias",), _as_it_is)
    if norm := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight", own):
        return Recipe((f"{block}attn_{norm[1]}_norm.weight",), lambda values: values[int(norm[2])])
    if own in ("linear_attn.A_log", "linear_attn.dt_bias"):
        tensor = "ssm_a" if own == "linear_attn.A_log" else "ssm_dt.bias"
        return Recipe((f"{block}{tensor}",), _of_linear_attention(tensor, config))
    if own == "self_attn.kv_b_proj.weight":
        return Recipe((f"{block}attn_k_b.weight", f"{block}attn_v_b.weight"), _keys_and_values)
    return None


def _one_after_another(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    return np.concatenate((gates, ups), 1)


def _interleaved(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    """`[experts, 2 * outputs, ...]`: a gate, then its projection up."""
    return np.stack((gates, ups), 2).reshape(gates.shape[0], -1, *gates.shape[2:])


def _keys_and_values(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`[heads, rank, keys]` and `[heads, values, rank]` as `[heads * (keys + values), rank]`."""
    joined = np.concatenate((keys.swapaxes(1, 2), values), 1)
    return joined.reshape(-1, joined.shape[-1])
