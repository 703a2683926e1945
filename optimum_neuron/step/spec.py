# SPDX-License-Identifier: Apache-2.0
"""The sizes of step graphs, their inputs and outputs. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..config import NeuronConfig
from .block_owners import OwnerSizes


# "scoring" is chunked prefill that also returns the logits of all its tokens: only who asks for those runs it.
GraphKind = Literal["token_generation", "chunked_prefill", "mixed", "scoring"]
DECODE, CHUNK = "decode", "chunk"
# Of a cache of blocks: the blocks of each row, in order, and the one that each token is written to.
BLOCK_TABLE, WRITE_BLOCKS = "block_table", "write_blocks"
# What inputs of a group's sampler are called.
SAMPLING_PARAMS, UNIFORMS = "sampling_params", "uniforms"
# How the names of outputs end that have a number for each token of the vocabulary.
LOGITS = ".logits"
# Logits of all tokens of a scoring graph's chunk rows, row after row; undefined for padding.
PROMPT = "prompt"
PROMPT_LOGITS = PROMPT + LOGITS
# The graph of decode rows' log-probabilities, where a step returns no logits of them. Of chunk rows it always does.
LOGPROBS = "logprobs_decode"


class SamplingParams(NamedTuple):
    """One row of `sampling_params`, in its order. Temperature 0 is greedy, top_k 0 is none."""

    top_k: float = 0
    top_p: float = 1.0
    temperature: float = 0.0
    min_p: float = 0.0

    def in_float32(self) -> SamplingParams:
        """Return the same as float32 holds it: no vocabulary has as many tokens as it has whole numbers."""
        return self._replace(top_k=min(self.top_k, 2**24))


GREEDY = SamplingParams()


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and torch dtype name of one input, output or state tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The shape of one step graph. Its kind is decided at export; nothing infers it from a length.

    Attributes:
        batch_size: R, decode rows of a step that has them, and slots of a cache without blocks.
        ctx_batch_size: P, prompts advanced by a step that has chunk rows.
        chunk_size: C, tokens per chunk; 0 without chunk rows.
        context_length: tokens of a row that attention reads, at most.
        kv_block_size: tokens of a block; None: row i has slot i for itself.
        kv_blocks: blocks that rows may have. Padding is written to those after them.
        blocks_in_place: K, the first blocks of the cache, which decode rows attend in place, whatever `context_length` is; 0: none.
        shared_blocks: X, those of them that may have several owners.
    """

    kind: GraphKind
    batch_size: int
    sequence_length: int
    ctx_batch_size: int
    chunk_size: int
    context_length: int
    on_device_sampling: bool
    decode_logits: bool
    kv_block_size: int | None = None
    kv_blocks: int = 0
    blocks_in_place: int = 0
    shared_blocks: int = 0

    @cached_property
    def name(self) -> str:
        """The stem of its file, unique in an artifact."""
        chunk = f"_chunk{self.chunk_size}" if self.has_chunk else ""
        return f"{self.kind}{chunk}_context{self.context_length}"

    @property
    def has_decode(self) -> bool:
        return self.kind in ("token_generation", "mixed")

    @property
    def has_chunk(self) -> bool:
        return self.kind != "token_generation"

    @property
    def scores_prompts(self) -> bool:
        return self.kind == "scoring"

    @property
    def tokens(self) -> int:
        """Return the tokens that a step has room for: those of decode rows, then of chunk rows."""
        return self.batch_size * self.has_decode + self.prompt_capacity

    @property
    def prompt_capacity(self) -> int:
        return self.ctx_batch_size * self.chunk_size * self.has_chunk

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all inputs, in the order in which a compiled graph takes them."""
        groups = []
        if self.has_decode:
            groups += self._group_inputs(DECODE, self.batch_size, 1)
        if self.has_chunk:
            groups += self._group_inputs(CHUNK, self.ctx_batch_size, self.chunk_size)
        return tuple(groups)

    def _group_inputs(self, group: str, rows: int, tokens: int) -> list[TensorSpec]:
        specs = [
            TensorSpec(f"{group}.input_ids", (rows, tokens), "int32"),
            TensorSpec(f"{group}.position_ids", (rows, tokens), "int32"),
        ]
        if group == CHUNK:  # decode row i is slot i: an input that says so would have no user in the graph
            specs.append(TensorSpec(f"{group}.seq_ids", (rows,), "int32"))
        if self.kv_block_size is not None:
            owners = self.owner_sizes if group == DECODE else None
            table = {BLOCK_TABLE: (rows, self.context_length // self.kv_block_size)}
            shapes = (table if owners is None else owners.shapes()) | {WRITE_BLOCKS: (rows, tokens)}
            specs += [TensorSpec(f"{group}.{name}", shape, "int32") for name, shape in shapes.items()]
        return [*specs, *sampler_inputs(group, rows)] if self.on_device_sampling else specs

    @property
    def owner_sizes(self) -> OwnerSizes | None:
        """Return the sizes of `BlockOwners`; None where no decode rows attend in place."""
        if self.kv_block_size is None or not self.blocks_in_place or not self.has_decode:
            return None
        row_blocks = self.sequence_length // self.kv_block_size
        return OwnerSizes(self.batch_size, row_blocks, self.blocks_in_place, self.kv_block_size, self.shared_blocks)

    def outputs(self, vocab_size: int) -> tuple[TensorSpec, ...]:
        """Return all outputs, in the order in which a compiled graph returns them."""
        specs = []
        for group, present, rows in (
            (DECODE, self.has_decode, self.batch_size),
            (CHUNK, self.has_chunk, self.ctx_batch_size),
        ):
            if present and self.on_device_sampling:
                specs.append(TensorSpec(f"{group}.tokens", (rows,), "int32"))
            if present and self.returns_logits(group):
                specs.append(TensorSpec(group + LOGITS, (rows, vocab_size), "float32"))
        if self.scores_prompts:
            specs.append(TensorSpec(PROMPT_LOGITS, (self.tokens, vocab_size), "float32"))
        return tuple(specs)

    def returns_logits(self, group: str) -> bool:
        """Return whether a group's logits are outputs. Those of chunk rows are, so that a host can choose any request's first token."""
        return group == CHUNK or self.decode_logits


def row_counts(config: NeuronConfig) -> dict[str, int]:
    return {DECODE: config.batch_size, CHUNK: config.ctx_batch_size}


def sampler_inputs(group: str, rows: int) -> tuple[TensorSpec, TensorSpec]:
    return (
        TensorSpec(f"{group}.{SAMPLING_PARAMS}", (rows, len(SamplingParams._fields)), "float32"),
        TensorSpec(f"{group}.{UNIFORMS}", (rows,), "float32"),
    )


def graph_specs(config: NeuronConfig) -> tuple[GraphSpec, ...]:
    """Return all graphs of an artifact: token generation per context bucket, chunked prefill and with `mixed_step` mixed steps per chunk
    size and context bucket that it can fill, and with `prompt_logits` scoring per chunk size: its head costs more than attention.
    """
    with_chunks: tuple[GraphKind, ...] = ("chunked_prefill", "mixed") if config.mixed_step else ("chunked_prefill",)
    specs = []
    for context in config.context_buckets:
        specs.append(_make_spec(config, "token_generation", 0, context))
        for chunk in config.chunk_sizes:
            if context >= chunk:
                specs += [_make_spec(config, kind, chunk, context) for kind in with_chunks]
    if config.prompt_logits:
        specs += [_make_spec(config, "scoring", chunk, config.sequence_length) for chunk in config.chunk_sizes]
    return tuple(specs)


def _make_spec(config: NeuronConfig, kind: GraphKind, chunk_size: int, context_length: int) -> GraphSpec:
    decodes, blocks = kind in ("token_generation", "mixed"), config.kv_blocks
    if kind == "token_generation":  # a share as large as the context's
        blocks = -(-config.kv_blocks * context_length // config.sequence_length)
    return GraphSpec(
        kind=kind,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        ctx_batch_size=config.ctx_batch_size,
        chunk_size=chunk_size,
        context_length=context_length,
        on_device_sampling=config.on_device_sampling,
        decode_logits=config.returns_decode_logits,
        kv_block_size=config.kv_block_size,
        kv_blocks=config.kv_blocks if config.kv_block_size else 0,
        blocks_in_place=blocks if decodes and config.blocks_in_place else 0,
        shared_blocks=config.shared_blocks if decodes else 0,
    )
