# SPDX-License-Identifier: Apache-2.0
"""The runs by which a model as steps is compared with itself: by transformers' own code at once, and in steps beside another prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...config import LARGEST_SCAN_BLOCK, NeuronConfig
from ..experts import EXPERTS_NAME, set_experts
from ..interface import set_implementation
from ..kv_cache import KVCache
from ..model_cache import CacheNeeds
from ..ops import EAGER_OPS
from ..spec import GraphKind, GraphSpec, ModelSpec, graph_specs, state_specs
from ..step import StepModule, example_inputs


# Enough tokens for chunks of several sizes, few enough for the largest models; whose logits are compared.
PROMPT, _CHUNK, _LENGTH = 7, 4, 16
OUTPUTS = (2, 4, 5, 6)
# Of recurrences: a prompt that is longer than their blocks and ends by one token many times, which no product of keys may
# overflow on; and the first token behind a cut, as a state may be forgotten within few.
_LONG_START, LONG_PROMPT = 6, LARGEST_SCAN_BLOCK + 2
_LONG_CUTS = (0, 47, 48, LARGEST_SCAN_BLOCK, LONG_PROMPT - 1)
LONG_OUTPUTS = (47, LARGEST_SCAN_BLOCK, LONG_PROMPT - 1)


def random_prompt(vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size // 8, vocab_size - vocab_size // 8, (PROMPT,), generator=generator)


def long_prompts(vocab_size: int) -> tuple[Tensor, Tensor]:
    """`[LONG_PROMPT]` each: a few tokens, and the last of them again and again; and another prompt."""
    start = random_prompt(vocab_size, seed=3)[:_LONG_START]
    repeated = start[-1].expand(LONG_PROMPT - _LONG_START)
    return torch.cat([start, repeated]), start[0].expand(LONG_PROMPT)


def own_logits(
    model: PreTrainedModel, prompt: Tensor, position_ids: Tensor | None = None, outputs: tuple[int, ...] = OUTPUTS
) -> Tensor:
    """`[outputs, vocab]` float32 by transformers' own attention and experts; by default with positions of the model's making."""
    ours = model.config._attn_implementation
    # Code that adds a bias to its scores may do so otherwise where torch attends, as it does by default.
    by_torch = CacheNeeds.of(model).biased and getattr(model, "_supports_sdpa", False)
    set_implementation(model, "sdpa" if by_torch else "eager")
    set_experts(model, "eager")
    try:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        logits: Tensor = model(input_ids=prompt[None], use_cache=False, **positions).logits[0]
    finally:
        set_implementation(model, ours)
        set_experts(model, EXPERTS_NAME)
    return logits[list(outputs)].float()


def step_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor, neighbor: Tensor) -> Tensor:
    """Logits after the tokens `OUTPUTS` of a prompt in slot 1, in steps that it shares with a neighbor in slot 0."""
    graphs = _graphs(model, spec, _CHUNK)
    texts = (neighbor, prompt)
    outputs = [
        graphs["chunked_prefill"](*_inputs(graphs["chunked_prefill"].spec, texts, {}, (1, 0, 3)))[0][0],
        graphs["mixed"](*_inputs(graphs["mixed"].spec, texts, {0: 0}, (1, 3, 5)))[1][0],
        graphs["mixed"](*_inputs(graphs["mixed"].spec, texts, {1: 5}, (0, 1, 5)))[0][1],
        graphs["token_generation"](*_inputs(graphs["token_generation"].spec, texts, {0: 5, 1: 6}, None))[0][1],
    ]
    return torch.stack(outputs)


def long_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor, neighbor: Tensor) -> Tensor:
    """Logits after the tokens `LONG_OUTPUTS` of a prompt in slot 1, which another request had before."""
    graphs = _graphs(model, spec, LARGEST_SCAN_BLOCK, 2 * LARGEST_SCAN_BLOCK)
    texts = (neighbor, neighbor)
    prefill, decode = graphs["chunked_prefill"], graphs["token_generation"]
    prefill(*_inputs(prefill.spec, texts, {}, (1, 0, _LONG_START)))
    texts, last = (neighbor, prompt), LONG_PROMPT - 1
    chunks = [_inputs(prefill.spec, texts, {}, (1, *each)) for each in pairwise(_LONG_CUTS)]
    outputs = [prefill(*inputs)[0][0] for inputs in chunks]
    outputs = [output for output, end in zip(outputs, _LONG_CUTS[1:], strict=True) if end - 1 in LONG_OUTPUTS]
    return torch.stack([*outputs, decode(*_inputs(decode.spec, texts, {1: last}, None))[0][1]])


def whole_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor) -> Tensor:
    """The same of steps that take the prompt alone and in one chunk."""
    graph = _graphs(model, spec, 2 * _CHUNK)["chunked_prefill"]
    ends = [_inputs(graph.spec, (prompt, prompt), {}, (1, 0, last + 1)) for last in OUTPUTS]
    return torch.stack([graph(*inputs)[0][0] for inputs in ends])


def _graphs(model: PreTrainedModel, spec: ModelSpec, chunk: int, length: int = _LENGTH) -> dict[GraphKind, StepModule]:
    config = NeuronConfig(
        batch_size=2, sequence_length=length, prefill_chunk_size=chunk, on_device_sampling=False, dtype="bfloat16"
    )
    dtype = str(model.dtype).removeprefix("torch.")
    states = state_specs(config, spec)
    cache = KVCache(replace(state, dtype=dtype) if state.dtype == config.dtype else state for state in states)
    return {graph.kind: StepModule(model, cache, graph, EAGER_OPS) for graph in graph_specs(config)}


def _inputs(
    graph: GraphSpec, texts: tuple[Tensor, ...], decode: dict[int, int], chunk: tuple[int, int, int] | None
) -> list[Tensor]:
    """A step's inputs: `decode` is slot to position, `chunk` is a slot, its first position and the one after its last."""
    inputs = dict(zip((tensor.name for tensor in graph.inputs()), example_inputs(graph.inputs()), strict=True))
    if graph.has_decode:
        inputs["decode.position_ids"].fill_(-1)
    for slot, position in decode.items():
        inputs["decode.position_ids"][slot] = position
        inputs["decode.input_ids"][slot] = texts[slot][position]
    if chunk is not None:
        slot, start, stop = chunk
        positions = torch.arange(start, start + graph.chunk_size).clamp(max=stop - 1)
        inputs["chunk.position_ids"][0] = positions
        inputs["chunk.input_ids"][0] = texts[slot][positions]
        inputs["chunk.seq_ids"][0] = slot
    return list(inputs.values())
