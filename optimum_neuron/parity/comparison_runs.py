# SPDX-License-Identifier: Apache-2.0
"""Runs of a model by transformers' own code and by step graphs, to compare their logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import LARGEST_SCAN_BLOCK, NeuronConfig
from ..step.attention.kv_cache import KVCache
from ..step.cache_needs import CacheNeeds
from ..step.features.experts.experts import EXPERTS_NAME, set_experts
from ..step.interface import set_implementation
from ..step.model_spec import ModelSpec
from ..step.ops import EAGER_OPS
from ..step.spec import GraphKind, GraphSpec, graph_specs
from ..step.state_specs import state_specs
from ..step.step import StepModule, example_inputs


# Enough tokens for chunks of several sizes, few enough for the largest models; the tokens with compared logits.
PROMPT, _CHUNK, _LENGTH = 7, 4, 16
OUTPUTS = (2, 4, 5, 6)
_LONG_START = 6


@dataclass(frozen=True)
class LongRun:
    """A prompt in chunks, with a last token of its own, in a slot that had the first tokens of another one before.

    `cuts` are where chunks begin and end, from 0 to the last token; `outputs` the tokens with compared logits, each the last of a chunk.
    """

    prompt: Tensor
    another: Tensor
    cuts: tuple[int, ...]
    outputs: tuple[int, ...]


def random_prompt(vocab_size: int, seed: int, length: int = PROMPT) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size // 8, vocab_size - vocab_size // 8, (length,), generator=generator)


def recurrent_run(vocab_size: int) -> LongRun:
    """Return a prompt longer than the blocks of recurrences. It ends with one token many times, which no product of keys may overflow on.

    The first token after a cut is compared, too, as a state may be forgotten within few.
    """
    last = LARGEST_SCAN_BLOCK + 1
    start = random_prompt(vocab_size, seed=3)[:_LONG_START]
    prompt, another = torch.cat([start, start[-1].expand(last + 1 - _LONG_START)]), start[0].expand(last + 1)
    return LongRun(prompt, another, (0, 47, 48, LARGEST_SCAN_BLOCK, last), (47, LARGEST_SCAN_BLOCK, last))


def selecting_run(vocab_size: int, width: int) -> LongRun:
    """Return a prompt for layers that select `width` keys together: three whole blocks precede the compared tokens."""
    whole = 3 * width
    prompt, another = (random_prompt(vocab_size, seed, whole + 3) for seed in (3, 4))
    cuts = (*range(0, whole, LARGEST_SCAN_BLOCK), whole, whole + 1, whole + 2)
    return LongRun(prompt, another, cuts, (whole, whole + 1, whole + 2))


def grouped_run(vocab_size: int, rates: Sequence[int], window: int) -> LongRun:
    """Return a prompt for compressed keys: several groups of each rate, and more than a window; it ends with a group of the least rate."""
    least = min(rates)
    last = (max(2 * max(rates), window) // least + 2) * least - 1
    first = min(47, last // 2)
    prompt, another = (random_prompt(vocab_size, seed, last + 1) for seed in (4, 5))
    cuts = (0, first, *range(first + 1, last, LARGEST_SCAN_BLOCK), last)
    return LongRun(prompt, another, cuts, (*(end - 1 for end in cuts[-3:]), last))


def own_logits(
    model: PreTrainedModel, prompt: Tensor, position_ids: Tensor | None = None, outputs: tuple[int, ...] = OUTPUTS
) -> Tensor:
    """Return `[outputs, vocab]` float32 by transformers' own attention and experts; by default with positions that the model makes."""
    set_experts(model, "eager")
    try:
        with own_attention(model):
            positions = {} if position_ids is None else {"position_ids": position_ids}
            logits: Tensor = model(input_ids=prompt[None], use_cache=False, **positions).logits[0]
    finally:
        set_experts(model, EXPERTS_NAME)
    return logits[list(outputs)].float()


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make a model attend by transformers' own code within."""
    ours = model.config._attn_implementation
    # Code that adds a bias to its scores may do so otherwise where torch attends, as it does by default.
    by_torch = CacheNeeds.read_code(model).biased and getattr(model, "_supports_sdpa", False)
    set_implementation(model, "sdpa" if by_torch else "eager")
    try:
        yield
    finally:
        set_implementation(model, ours)


def step_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor, neighbor: Tensor) -> Tensor:
    """Return logits after the tokens `OUTPUTS` of a prompt in slot 1, in steps that it shares with a neighbor in slot 0."""
    graphs = _make_graphs(model, spec, _CHUNK)
    texts = (neighbor, prompt)
    outputs = [
        graphs["chunked_prefill"](*_make_inputs(graphs["chunked_prefill"].spec, texts, {}, (1, 0, 3)))[0][0],
        graphs["mixed"](*_make_inputs(graphs["mixed"].spec, texts, {0: 0}, (1, 3, 5)))[1][0],
        graphs["mixed"](*_make_inputs(graphs["mixed"].spec, texts, {1: 5}, (0, 1, 5)))[0][1],
        graphs["token_generation"](*_make_inputs(graphs["token_generation"].spec, texts, {0: 5, 1: 6}, None))[0][1],
    ]
    return torch.stack(outputs)


def long_logits(model: PreTrainedModel, spec: ModelSpec, run: LongRun) -> Tensor:
    """Return logits after the tokens `run.outputs` of the prompt, in slot 1."""
    length = 2 * LARGEST_SCAN_BLOCK
    graphs = _make_graphs(model, spec, LARGEST_SCAN_BLOCK, -(-len(run.prompt) // length) * length)
    prefill, decode = graphs["chunked_prefill"], graphs["token_generation"]
    prefill(*_make_inputs(prefill.spec, (run.another, run.another), {}, (1, 0, _LONG_START)))
    texts, last = (run.another, run.prompt), len(run.prompt) - 1
    outputs = [prefill(*_make_inputs(prefill.spec, texts, {}, (1, *each)))[0][0] for each in pairwise(run.cuts)]
    outputs = [output for output, end in zip(outputs, run.cuts[1:], strict=True) if end - 1 in run.outputs]
    return torch.stack([*outputs, decode(*_make_inputs(decode.spec, texts, {1: last}, None))[0][1]])


def whole_logits(model: PreTrainedModel, spec: ModelSpec, prompt: Tensor) -> Tensor:
    """Return the logits of steps that take the prompt alone and in one chunk."""
    graph = _make_graphs(model, spec, 2 * _CHUNK)["chunked_prefill"]
    ends = [_make_inputs(graph.spec, (prompt, prompt), {}, (1, 0, last + 1)) for last in OUTPUTS]
    return torch.stack([graph(*inputs)[0][0] for inputs in ends])


def _make_graphs(
    model: PreTrainedModel, spec: ModelSpec, chunk: int, length: int = _LENGTH
) -> dict[GraphKind, StepModule]:
    config = NeuronConfig(
        batch_size=2, sequence_length=length, prefill_chunk_size=chunk, on_device_sampling=False, dtype="bfloat16"
    )
    dtype = str(model.dtype).removeprefix("torch.")
    states = state_specs(config, spec)
    cache = KVCache(replace(state, dtype=dtype) if state.dtype == config.dtype else state for state in states)
    return {graph.kind: StepModule(model, cache, graph, EAGER_OPS) for graph in graph_specs(config)}


def _make_inputs(
    graph: GraphSpec, texts: tuple[Tensor, ...], decode: dict[int, int], chunk: tuple[int, int, int] | None
) -> list[Tensor]:
    """Return a step's inputs: `decode` is slot to position, `chunk` is a slot, its first position and the one after its last."""
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
