# SPDX-License-Identifier: Apache-2.0
"""Tiny models with each feature of layers, and the logits that transformers' own code gives for a text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import biased
import compressing
import moe
import numpy as np
import recurrent
import selecting
import torch
from architectures.models import graph_model
from sharp import sharpen
from tiny import TINY_CONFIGS
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from optimum_neuron.parity.conditions import few_keys
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.step.features.experts.experts import set_experts
from optimum_neuron.step.interface import ATTENTION_NAME, with_attention
from optimum_neuron.step.model_spec import ModelSpec


# From a text to the logits of all its tokens, and the error that they may have.
Expected = Callable[[np.ndarray], tuple[Tensor, float]]


@dataclass(frozen=True)
class Feature:
    """A model with the cached attention, and what its graphs have to give; no `expected`: bits alone are compared."""

    model: Callable[[], Any]
    expected: Expected | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    prompt: int = 40


def logits_of(model: Any, text: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.to(dtype)(input_ids=torch.from_numpy(text)[None].long(), use_cache=False).logits[0]
    model.float()
    return logits


def as_computed(reference: Callable[[], Any], text: np.ndarray) -> tuple[Tensor, float]:
    logits = logits_of(reference(), text)
    return logits, 3e-5 * float(logits.abs().max())


def with_noise(reference: Callable[[], Any], text: np.ndarray) -> tuple[Tensor, float]:
    """As close to float64 as transformers' own float32 is."""
    exact, single = (logits_of(reference(), text, dtype).double() for dtype in (torch.float64, torch.float32))
    noise = float((single - exact).abs().max())
    assert float(exact.std()) > 100 * noise
    return exact, 3 * noise + 1e-6


def by_few_keys(reference: Callable[[], Any], most: int, text: np.ndarray) -> tuple[Tensor, float]:
    """With so many selected keys, of equal scores the first; one less gives other logits."""
    with few_keys(reference(), most):
        logits, error = as_computed(reference, text)
    with few_keys(reference(), most - 1):
        assert (logits_of(reference(), text) - logits)[30:].abs().amax(-1).min() > 30 * error
    return logits, error


def biased_logits(name: str, text: np.ndarray) -> tuple[Tensor, float]:
    exact, own = (biased.own_logits(name, text.tolist(), each).double() for each in (torch.float64, torch.float32))
    return exact, 2 * float((own - exact).abs().max())


@cache
def _selecting(kind: str) -> Any:
    return selecting.make_model(kind).eval().requires_grad_(False)


@cache
def _experts(name: str) -> Any:
    return moe.make_model(name).eval().requires_grad_(False)


@cache
def _tiny(name: str) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(TINY_CONFIGS[name](), dtype=torch.float32, attn_implementation="eager")
    sharpen(made)
    return made.eval().requires_grad_(False)


@cache
def cached(reference: Callable[[], Any]) -> Any:
    """The same model with the cached attention."""
    own = reference()
    config: PreTrainedConfig = copy.deepcopy(own.config)
    made = with_attention(
        lambda attention: AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
        ),
        ATTENTION_NAME,
    )
    made.load_state_dict(own.state_dict())
    return made.eval().requires_grad_(False)


@cache
def _recurrent(kind: str) -> Any:
    own = AutoModelForCausalLM.from_config(recurrent.CONFIGS[kind](), attn_implementation="eager").eval()
    own.load_state_dict(recurrent.model(kind).state_dict())
    set_experts(own, "eager")
    return own


def _of(
    reference: Callable[[], Any], expected: Callable[..., tuple[Tensor, float]], *args: Any, **more: Any
) -> Feature:
    return Feature(partial(cached, reference), partial(expected, reference, *args), **more)


_SHORT_ROWS: dict[str, Any] = {"prefill_chunk_size": 3, "ctx_batch_size": 3}
_LONG: dict[str, Any] = {"prefill_chunk_size": 96, "sequence_length": 256, "context_buckets": (256,)}
# What a token selects: keys; blocks of four for each head with keys, its own among them; pools of four, and what follows the last.
SELECTED = {
    "deepseek_v32": selecting.SELECTED,
    "glm_moe_dsa": selecting.SELECTED,
    "hy_v4": selecting.SELECTED,
    "minimax_m3_vl_text": 3,
    "qwen4_exp_text": 3,
}
# Rates at which keys are compressed: groups longer than texts or contexts, and of any size.
_RATES: dict[str, tuple[int, int]] = {"deepseek_v4": (4, 8), "no group": (4, 128), "later": (4, 32), "odd": (3, 5)}


_COMPRESSING = {name: partial(compressing.reference, rates) for name, rates in _RATES.items()}


def _compressing(name: str, **sizes: Any) -> Feature:
    reference = _COMPRESSING[name]
    expected = partial(by_few_keys, reference, compressing.SELECTED)
    return Feature(partial(cached, reference), expected, sizes)


FEATURES: dict[str, Feature] = (
    {"deepseek_v4": _compressing("deepseek_v4"), "short rows": _compressing("deepseek_v4", **_SHORT_ROWS)}
    | {name: _compressing(name, context_buckets=(16, 64)) for name in ("no group", "later", "odd")}
    | {kind: _of(partial(_selecting, kind), by_few_keys, count) for kind, count in SELECTED.items()}
    | {
        kind: Feature(
            partial(recurrent.model, kind), partial(with_noise, partial(_recurrent, kind)), _LONG, prompt=121
        )
        for kind in recurrent.CONFIGS
    }
    | {
        name: Feature(partial(biased.model_of, name), partial(biased_logits, name), biased.SIZES, prompt=90)
        for name in biased.MODELS
    }
    | {name: Feature(partial(graph_model, name, torch.float32)) for name in ("codegen", "gptj", "megatron-bert")}
    | {name: _of(partial(_experts, name), as_computed) for name in moe.CONFIGS}
    | {"lfm2": _of(partial(_tiny, "lfm2"), as_computed, sizes={"prefill_chunk_size": 2, "ctx_batch_size": 3})}
    | {
        f"{name} in {kind}": Feature(partial(cached, partial(_tiny, name)), sizes={"kv_cache_dtype": kind})
        for name, kind in (("gemma2", "int8"), ("gpt_oss", "fp8"), ("deepseek_v3", "int8"))
    }
)


@cache
def spec_of(name: str) -> ModelSpec:
    return inspect_model(FEATURES[name].model())
