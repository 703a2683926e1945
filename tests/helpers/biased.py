# SPDX-License-Identifier: Apache-2.0
"""Tiny models that add a bias by column to their scores (ALiBi), and what a request's steps answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from architectures import configs
from helpers import as_tensor, decode_rows, prefill_pieces
from sharp import sharpen
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.interface import ATTENTION_NAME, set_implementation


SIZES: dict[str, Any] = {"sequence_length": 192, "context_buckets": (192,), "prefill_chunk_size": 32}
BLOCKS = SIZES | {"kv_block_size": 64, "kv_cache_tokens": 384}
GENERATOR = torch.Generator().manual_seed(3)
PROMPT, OTHER = (torch.randint(3, 60, (count,), generator=GENERATOR, dtype=torch.int32).numpy() for count in (90, 60))
PIECES = ([32, 32, 26], [1, 30, 28, 31])
# Slopes that are powers of two and others, a table rounded to bfloat16, and one that ends with the longest text; some as torch's
# attention takes a bias.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {}, "eager"),
    "bloom6": ("bloom", {"n_head": 6, "hidden_size": 96}, "eager"),
    "mpt": ("mpt", {}, "eager"),
    "mpt6": ("mpt", {"n_heads": 6, "hidden_size": 96}, "eager"),
    "falcon": ("falcon", {"alibi": True}, "sdpa"),
    "falcon6": ("falcon", {"alibi": True, "multi_query": True, "num_attention_heads": 6, "hidden_size": 96}, "sdpa"),
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model whose attention decides, with this project's attention."""
    kind, changes, implementation = MODELS[name]
    config = configs.tiny_config(kind)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation).eval()
    sharpen(model)
    set_implementation(model, ATTENTION_NAME)
    return model.to(dtype)


@torch.no_grad()
def own_logits(name: str, text: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    model = model_of(name).to(dtype)
    set_implementation(model, MODELS[name][2])
    try:
        logits: Tensor = model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    finally:
        set_implementation(model, ATTENTION_NAME)
        model.float()
    return logits


def answers(runner: GraphRunner, row: int, pieces: Sequence[int], *, beside: bool = True) -> list[Tensor]:
    """Logits of a row after its prompt and of each token behind it, some in steps with another prompt's chunks."""
    logits, done = [prefill_pieces(runner, row, PROMPT, pieces)], 0
    for index in range(5):
        count = min(20, len(OTHER) - done) if beside else 0
        chunks = [PromptPiece(2, OTHER[done : done + count])] if count else []
        output = runner.run_step(chunks, decode_rows(runner, {row: 3 + index}))
        assert output.decode_logits is not None
        logits.append(as_tensor(output.decode_logits[row]))
        done += count
    return logits


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
