# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file that make each parameter of a transformers model.

Names are those of gguf's own table, which llama.cpp's converter uses; a change here undoes a change of the converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel


Make = Callable[..., np.ndarray]
_TRANSPOSED = r"(?:attn_qkv|attn_output|ffn_up|ffn_down)\.weight"


@dataclass(frozen=True)
class Recipe:
    """A way to make a parameter.

    Attributes:
        tensors: names in the file.
        make: makes the parameter's numbers, also in another order of rows, of those of the tensors, `[..., outputs, inputs]` each. A function
            that only moves rows takes any number of inputs.
        is_transposed: the parameter has inputs before outputs.
    """

    tensors: tuple[str, ...]
    make: Make
    is_transposed: bool = False


def recipes(model: PreTrainedModel, architecture: str) -> dict[str, Recipe]:
    """Return recipes by parameter; a parameter that no tensor of this architecture stands for has none.

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
        made, tensor = _joined_recipe(name, architecture, model.config), _tensor_name(name, known)
        if made is None and tensor is not None:
            made = _changed_recipe(tensor, architecture, model.config)
        if made is not None:
            found[name] = made
    return found


def stored_names(model: PreTrainedModel) -> list[str]:
    """Return the names of a checkpoint's tensors; of tied ones the first."""
    kept = model.state_dict().keys()
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in kept]


def _tensor_name(name: str, known: Any) -> str | None:
    """Return a tensor's name in the file, by a parameter's; gguf knows some modules only by names without the first part."""
    module, _, own = name.rpartition(".")
    if own not in ("weight", "bias"):
        module, own = name, "weight"
    found = known.get_name(module) or known.get_name(module.partition(".")[2])
    return None if found is None else f"{found}.{own}"


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
        make = _as_it_is if experts[1] == "down" else _interleaved if is_oss else _one_after_another
        tensors = tuple(f"{block}ffn_{part}_exps.{kind}" for part in experts[1].split("_"))
        return Recipe(tensors, make, is_oss and kind == "weight")
    if own.endswith("e_score_correction_bias"):
        return Recipe((f"{block}exp_probs_b.bias",), _as_it_is)
    if norm := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight", own):
        return Recipe((f"{block}attn_{norm[1]}_norm.weight",), lambda values: values[int(norm[2])])
    if own in ("linear_attn.A_log", "linear_attn.dt_bias"):
        return _changed_recipe(
            f"{block}ssm_a" if own == "linear_attn.A_log" else f"{block}ssm_dt.bias", architecture, config
        )
    if own == "self_attn.kv_b_proj.weight":
        return Recipe((f"{block}attn_k_b.weight", f"{block}attn_v_b.weight"), _keys_and_values)
    return None


def _one_after_another(gates: np.ndarray, ups: np.ndarray) -> np.ndarray:
    return np.concatenate((gates, ups), 1)


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
