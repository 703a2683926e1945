# SPDX-License-Identifier: Apache-2.0
"""The config of a GGUF file: each key is translated, compared or listed as one without effect, or the file is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import first_line
from .architectures import ARCHITECTURES, NORMS, Architecture
from .header import GgufHeader
from .keys import NEEDED, REMEDY, GgufKeys


_SCALING = "rope.scaling."
_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# llama.cpp's, where a file names none (llama_hparams and llama_context_params in its sources).
_THETA, _BETA_FAST, _BETA_SLOW = 10000.0, 32.0, 1.0
# All published models with the type "llama3" have these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _read_rope(
    keys: GgufKeys, head_dim: int, longest: int, fixed: Mapping[str, Any], *, is_partial: bool
) -> dict[str, Any]:
    """Return the rotary embedding's parameters by transformers' names, with llama.cpp's values for missing ones.

    `fixed` has parameters of the type "yarn" that stand in no key. With `is_partial` a part of each head can be rotated.
    """
    found: dict[str, Any] = {"rope_theta": keys.take_number("rope.freq_base", _THETA), "rope_type": "default"}
    rotated = keys.take_whole("rope.dimension_count", head_dim, least=1)
    if rotated != head_dim and (not is_partial or rotated > head_dim or rotated % 2):
        raise keys.make_refusal("rope.dimension_count", f"heads of {head_dim} dimensions are rotated as a whole here")
    if is_partial:  # transformers rounds the product of this part and the dimensions down
        part = rotated / head_dim
        found["partial_rotary_factor"] = part if int(head_dim * part) == rotated else math.nextafter(part, math.inf)
    return found | _read_scaling(keys, found["rope_theta"], rotated, longest, fixed)


def _read_scaling(
    keys: GgufKeys, theta: float, rotated: int, longest: int, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    factor = keys.take_number(f"{_SCALING}factor", keys.take_number("rope.scale_linear", 0.0))
    # llama.cpp takes a factor without a type for the type "linear", and none for 1.
    kind = keys.take_text(f"{_SCALING}type", "linear" if factor else "none")
    original = keys.take_whole(f"{_SCALING}original_context_length", longest, least=1)
    if _SHORT in keys.header.tensors or _LONG in keys.header.tensors:
        return _read_longrope(keys, kind, rotated, original)
    keys.require_same(f"{_SCALING}attn_factor", 1.0, why="it is known of files with rope_factors_long.weight alone")
    if _FREQUENCIES in keys.header.tensors:
        if kind != "none":
            raise keys.make_refusal(f"{_SCALING}type", f"the file also has the factors {_FREQUENCIES}")
        return _of_factors(_read_factors(keys, _FREQUENCIES, rotated), theta, rotated, longest)
    if kind == "none":
        return {}
    if factor <= 0:
        raise ValueError(f"{keys.source} has rope.scaling.type={kind} and rope.scaling.factor={factor}; {REMEDY}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.make_refusal(f"{_SCALING}type", "only linear, yarn, longrope and none are known")
    keys.require_same(f"{_SCALING}yarn_ext_factor", 1.0, why="transformers extrapolates by 1")
    # llama.cpp's converter writes transformers' attention_factor so.
    attention = keys.take_number(f"{_SCALING}yarn_attn_factor", None)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.take_number(f"{_SCALING}yarn_beta_fast", _BETA_FAST),
        "beta_slow": keys.take_number(f"{_SCALING}yarn_beta_slow", _BETA_SLOW),
        **({} if attention is None else {"attention_factor": attention}),
        **fixed,
    }


def _read_longrope(keys: GgufKeys, kind: str, rotated: int, original: int) -> dict[str, Any]:
    if kind not in ("none", "longrope"):
        raise keys.make_refusal(f"{_SCALING}type", f"the file also has the factors {_LONG}")
    short, long = (_read_factors(keys, name, rotated) for name in (_SHORT, _LONG))
    attention = keys.take_number(f"{_SCALING}attn_factor", 1.0)
    own = {"original_max_position_embeddings": original, "attention_factor": attention}
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(), **own}


def _read_factors(keys: GgufKeys, name: str, rotated: int) -> np.ndarray:
    """Return `[rotated / 2]` float32, the divisors of the inverse frequencies."""
    keys.find_tensor(name)
    factors = keys.header.read_values(name)
    keys.tensors.add(name)
    if factors.shape != (rotated // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ValueError(
            f"{keys.source}: {name} of the shape {list(factors.shape)} holds no {rotated // 2} positive numbers, one for each "
            f"frequency; convert it again"
        )
    return factors


def _of_factors(factors: np.ndarray, theta: float, rotated: int, longest: int) -> dict[str, Any]:
    """Return the type "llama3" where its published parameters make these factors, and otherwise a type that takes any factors."""
    if (factors == 1).all():
        return {}
    llama3 = {"rope_type": "llama3", "rope_theta": theta, "factor": float(str(factors.max())), **_LLAMA3}
    config = LlamaConfig(hidden_size=rotated, num_attention_heads=1, rope_parameters=llama3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = theta ** (-np.arange(0, rotated, 2) / rotated)
    # Float32 frequencies were computed in another order.
    if np.allclose(frequencies.numpy(), plain / factors, rtol=1e-5, atol=0):
        return llama3
    given = [float(str(factor)) for factor in factors]
    own = {"factor": 1.0, "original_max_position_embeddings": longest, "attention_factor": 1.0}
    return {"rope_type": "longrope", "short_factor": given, "long_factor": given, **own}


TABLE, HEAD = "token_embd.weight", "output.weight"
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# Keys, and the names that nearly all configs have for them.
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}  # fmt: skip


def read_config(header: GgufHeader, source: str) -> tuple[PreTrainedConfig, frozenset[str]]:
    """Return the config of a file's model, and its tensors that need no place; raise ValueError for a key or value that no model has."""
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise ValueError(
            f"{source} has the architecture {header.architecture}, and GGUF files are read only with {', '.join(sorted(ARCHITECTURES))}; "
            f"{REMEDY}"
        )
    keys = GgufKeys(header, source)
    found = _read_sizes(keys, architecture)
    found["head_dim"] = _head_dim(keys, architecture, found)
    if architecture.rope is not None:
        sizes, partial = (found["head_dim"], found["max_position_embeddings"]), architecture.is_partial
        found["rope_parameters"] = _read_rope(keys, *sizes, architecture.rope, is_partial=partial)
    for key, name in architecture.numbers.items():
        found[name] = keys.take_number(key, architecture.defaults.get(key, NEEDED))
    for key, value in architecture.same.items():
        keys.require_same(key, value, why=f"all known files of {header.architecture} have {value}")
    for key in NORMS:  # the converter writes both epsilons where a config has both
        keys.take_number(key, 0.0)
    for name, ending in architecture.tensors.items():
        found[name] = any(tensor.endswith(f".{ending}") for tensor in header.tensors)
    found |= architecture.fixed
    for more in architecture.more:
        found |= more(keys, found)
    keys.check_all_taken()
    config_class = CONFIG_MAPPING[found.pop("model_type", architecture.model_type)]
    usual = found["hidden_size"] // found["num_attention_heads"]
    if found["head_dim"] == usual and "head_dim" not in {field.name for field in fields(config_class)}:
        del found["head_dim"]
    named = {architecture.names.get(name, name): value for name, value in found.items()}
    try:
        return config_class(**named), frozenset(keys.tensors)
    except Exception as error:  # transformers has each class make checks
        raise ValueError(
            f"{source}: its keys make no {config_class.__name__} ({first_line(error)}); {REMEDY}"
        ) from error


def _read_sizes(keys: GgufKeys, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes that each config has, and the ids of special tokens, by their common names."""
    header, rows = keys.header, keys.find_tensor(TABLE).shape[0]
    keys.require_same("vocab_size", rows, why=f"{TABLE} has {rows} rows")
    sizes = {name: keys.take_whole(key, least=1) for key, name in _SIZES.items()}
    # Blocks after the last layer guess further tokens: no logit depends on them, and transformers has none.
    layers = sizes["num_hidden_layers"] - keys.take_whole("nextn_predict_layers", 0)
    blocks = {name: int(match[1]) for name in header.tensors if (match := _BLOCK.match(name))}
    further = {name for name, block in blocks.items() if layers <= block < sizes["num_hidden_layers"]}
    if layers < 1 or (further and not any(".nextn." in name for name in further)):
        raise keys.make_refusal("nextn_predict_layers", "so many of its last blocks are layers like the others")
    keys.tensors |= further
    sizes["num_hidden_layers"] = layers
    of_keys = keys.take_layers("attention.head_count_kv", layers, sizes["num_attention_heads"])
    if isinstance(of_keys, tuple) and not architecture.layers_vary:
        if len(set(of_keys)) != 1:
            raise keys.make_refusal("attention.head_count_kv", "the layers of this model differ in heads")
        of_keys = of_keys[0]
    sizes |= {"num_key_value_heads": of_keys, "vocab_size": rows, "tie_word_embeddings": HEAD not in header.tensors}
    for name, key in _TOKENS.items():
        sizes[name] = keys.take_whole(key, None)
        if sizes[name] is not None and sizes[name] >= rows:
            raise keys.make_refusal(key, f"the model has {rows} tokens")
    return sizes


def _head_dim(keys: GgufKeys, architecture: Architecture, sizes: dict[str, Any]) -> int:
    if architecture.is_latent:
        return int(keys.take_whole("rope.dimension_count", least=1))
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    found: int = keys.take_whole("attention.key_length", usual, least=1)
    if found != usual and not architecture.heads_vary:
        raise keys.make_refusal(
            "attention.key_length", f"a {architecture.model_type} of these sizes has heads of {usual}"
        )
    keys.require_same("attention.value_length", found, why=f"transformers has values as wide as keys, {found}")
    return found
