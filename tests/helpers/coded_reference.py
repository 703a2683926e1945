# SPDX-License-Identifier: Apache-2.0
"""transformers' models whose keys and values are rounded to codes and back before they are attended to, in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask


KINDS = ("int8", "fp8")


def rounded(states: Tensor, kind: str) -> Tensor:
    """`[..., dim]` after a trip through codes of one scale for each head of a token: what they then stand for, in float32."""
    limit = 127 if kind == "int8" else 240
    scale = states.float().abs().amax(-1, keepdim=True) / limit
    parts = torch.where(scale > 0, states.float() / scale, 0.0)
    codes = parts.round() if kind == "int8" else parts.to(torch.float8_e4m3fn).float()
    return codes * scale


def _register(kind: str) -> None:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        own = sys.modules[type(module).__module__].eager_attention_forward
        key, value = (rounded(each, kind).to(query.dtype) for each in (key, value))
        return own(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(f"rounded_{kind}", attend)
    AttentionMaskInterface.register(f"rounded_{kind}", eager_mask)


for _kind in KINDS:
    _register(_kind)


def reference(folder: Path, kind: str) -> nn.Module:
    """The model of a checkpoint in float32, whose attention has its keys and values from codes."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=f"rounded_{kind}")
