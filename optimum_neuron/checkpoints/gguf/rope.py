# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a GGUF file, as the `rope_parameters` of a transformers config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .keys import REMEDY, GgufKeys


_SCALING = "rope.scaling."
_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# llama.cpp's, where a file names none (llama_hparams and llama_context_params in its sources).
_THETA, _BETA_FAST, _BETA_SLOW = 10000.0, 32.0, 1.0
# All published models with the type "llama3" have these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Relative difference of float32 frequencies that were computed in another order.
_CLOSE = 1e-5


def read_rope(
    keys: GgufKeys, head_dim: int, longest: int, fixed: Mapping[str, Any], *, is_partial: bool
) -> dict[str, Any]:
    """Return the parameters by transformers' names, with llama.cpp's values for missing ones.

    Args:
        head_dim: dimensions of a head of queries and keys.
        longest: positions of the model.
        fixed: parameters of the type "yarn" that stand in no key.
        is_partial: the class of transformers can rotate a part of each head.

    Raises:
        ValueError: the file asks for what transformers does not compute.
    """
    found: dict[str, Any] = {"rope_theta": keys.take_number("rope.freq_base", _THETA), "rope_type": "default"}
    rotated = keys.take_whole("rope.dimension_count", head_dim, least=1)
    if rotated != head_dim and (not is_partial or rotated > head_dim or rotated % 2):
        raise keys.make_refusal("rope.dimension_count", f"heads of {head_dim} dimensions are rotated as a whole here")
    if is_partial:
        found["partial_rotary_factor"] = _rotated_part(rotated, head_dim)
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
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": keys.take_number(f"{_SCALING}attn_factor", 1.0),
    }


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
    """Return the type "llama3" where its published parameters make these factors, and otherwise a type that takes any factors.

    The file lacks the parameters, and several make the same factors.
    """
    if (factors == 1).all():
        return {}
    llama3 = {"rope_type": "llama3", "rope_theta": theta, "factor": float(str(factors.max())), **_LLAMA3}
    config = LlamaConfig(hidden_size=rotated, num_attention_heads=1, rope_parameters=llama3)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = theta ** (-np.arange(0, rotated, 2) / rotated)
    if np.allclose(frequencies.numpy(), plain / factors, rtol=_CLOSE, atol=0):
        return llama3
    given = [float(str(factor)) for factor in factors]
    return {
        "rope_type": "longrope",
        "short_factor": given,
        "long_factor": given,
        "factor": 1.0,
        "original_max_position_embeddings": longest,
        "attention_factor": 1.0,
    }


def _rotated_part(rotated: int, head_dim: int) -> float:
    """Return the part that transformers makes these dimensions of: it rounds the product down."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, math.inf)
