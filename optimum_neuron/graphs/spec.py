# SPDX-License-Identifier: Apache-2.0
"""What a step graph is from outside: its name, sizes, inputs, outputs and state. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from ..config import NeuronConfig
from .block_owners import OwnerSizes


GraphKind = Literal["token_generation", "chunked_prefill", "mixed"]
DECODE, CHUNK = "decode", "chunk"
# Of a cache of blocks: the blocks of each row, in order, and the one that each token is written to.
BLOCK_TABLE, WRITE_BLOCKS = "block_table", "write_blocks"
# What inputs of a group's sampler are called.
SAMPLING_PARAMS, UNIFORMS = "sampling_params", "uniforms"
# How the names of outputs end that have a number for each token of the vocabulary.
LOGITS = ".logits"
# The graph that tells log-probabilities of decode rows, where a step returns no logits of them. Of chunk rows it always does.
LOGPROBS = "logprobs_decode"


class SamplingParams(NamedTuple):
    """How the on-device sampler chooses: one row of `sampling_params`, in its order. At temperature 0 it is greedy, top_k 0 is none."""

    top_k: float = 0
    top_p: float = 1.0
    temperature: float = 0.0
    min_p: float = 0.0

    def in_float32(self) -> SamplingParams:
        """The same, whole: no vocabulary has so many tokens that float32 could not tell two numbers of them apart."""
        return self._replace(top_k=min(self.top_k, 2**24))


GREEDY = SamplingParams()


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and torch dtype name of one input, output or state tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


# The types of state tensors.
_ITEM_SIZES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def byte_count(specs: Iterable[TensorSpec]) -> int:
    """Memory that states take."""
    return sum(math.prod(spec.shape) * _ITEM_SIZES[spec.dtype] for spec in specs)


@dataclass(frozen=True)
class LayerCache:
    """Sizes of one attention layer's KV cache; `layer_idx` is the layer's own number in the model."""

    layer_idx: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ConvolutionState:
    """What a causal convolution keeps per slot: the inputs of the last `past` tokens.

    Attributes:
        index: which of the layer's convolutions.
    """

    layer_idx: int
    index: int
    past: int
    channels: int


@dataclass(frozen=True)
class RecurrentState:
    """What a recurrence keeps per slot, in float32: a state `[heads, key_dim, value_dim]`, and what the target needs beside it.

    Attributes:
        index: which of the layer's recurrences.
        width: numbers of a token that change the state.
    """

    layer_idx: int
    index: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def is_selective(self) -> bool:
        """Whether each of its columns has decays of its own, by the numbers of a token: a key, values, and as many decays."""
        return self.heads == 1 and self.width == self.key_dim + 2 * self.value_dim


@dataclass(frozen=True)
class KeySelection:
    """A layer that attends to the keys that it selects: it keeps an index key per token, where some may be left out.

    Attributes:
        key_dim: of an index key.
        always: so many keys are all attended to, whatever their scores.
        width: so many keys are selected together, which stand side by side.
    """

    layer_idx: int
    key_dim: int
    always: int
    width: int = 1

    def selects(self, config: NeuronConfig) -> bool:
        """Whether a token of these graphs may see more keys than it attends to."""
        return self.always < config.sequence_length


@dataclass(frozen=True)
class Compression:
    """Keys of a layer that stand for `rate` consecutive tokens each, and what slots keep until they have all of these.

    Attributes:
        index: which of the layer's compressions.
        spans: groups of `rate` tokens that a key is made of: its own, and where it is 2 the one before it.
        width: numbers of a token that keys are made of.
        key_dim: of a key.
    """

    layer_idx: int
    index: int
    rate: int
    spans: int
    width: int
    key_dim: int

    def has_groups(self, config: NeuronConfig) -> bool:
        """Whether a text of these graphs may have as many tokens as a key stands for."""
        return self.rate <= config.sequence_length


@dataclass(frozen=True)
class ModelSpec:
    """What the graphs of one model have in common: found by running the model once, not read from its config.

    Attributes:
        vocab_size: token ids that it chooses among, the width of its logits.
        num_embeddings: token ids that it can be given, the rows of the smallest table that it looks them up in.
    """

    vocab_size: int
    layers: tuple[LayerCache, ...]
    convolutions: tuple[ConvolutionState, ...] = ()
    recurrences: tuple[RecurrentState, ...] = ()
    selections: tuple[KeySelection, ...] = ()
    compressions: tuple[Compression, ...] = ()
    num_embeddings: int = field(kw_only=True)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a slot's first tokens alone can be another request's: not where state belongs to all tokens of a slot."""
        return not self.convolutions and not self.recurrences and not self.compressions

    @property
    def stateful_layers(self) -> set[int]:
        """Numbers of the layers that keep inputs of convolutions, states of recurrences, or compressed keys."""
        layers = {each.layer_idx for each in self.convolutions} | {each.layer_idx for each in self.recurrences}
        return layers | {each.layer_idx for each in self.compressions}

    @property
    def depth(self) -> int:
        """How many layers keep anything of a text."""
        return len({layer.layer_idx for layer in self.layers} | self.stateful_layers)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "num_embeddings": self.num_embeddings,
            "layers": [asdict(layer) for layer in self.layers],
        }
        if self.convolutions:
            data["convolutions"] = [asdict(state) for state in self.convolutions]
        if self.recurrences:
            data["recurrences"] = [asdict(state) for state in self.recurrences]
        if self.selections:
            data["selections"] = [asdict(selection) for selection in self.selections]
        if self.compressions:
            data["compressions"] = [asdict(compression) for compression in self.compressions]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        return cls(
            data["vocab_size"],
            tuple(LayerCache(**layer) for layer in data["layers"]),
            tuple(ConvolutionState(**state) for state in data.get("convolutions", ())),
            tuple(RecurrentState(**state) for state in data.get("recurrences", ())),
            tuple(KeySelection(**selection) for selection in data.get("selections", ())),
            tuple(Compression(**compression) for compression in data.get("compressions", ())),
            num_embeddings=data.get("num_embeddings", data["vocab_size"]),
        )


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The shape of one step graph.

    A graph's kind is decided here, at export; nothing infers it from a length.

    Attributes:
        batch_size: R, decode rows of a step that has decode rows, and slots of a cache without blocks.
        ctx_batch_size: P, prompts advanced by a step that has chunk rows.
        chunk_size: C, tokens per chunk; 0 in a graph without chunk rows.
        context_length: tokens of a row that attention reads, at most.
        kv_block_size: tokens of a block; None: row i has slot i for itself.
        kv_blocks: blocks that rows may have; padding is written to those behind them.
        blocks_in_place: K, the first blocks of the cache, which decode rows attend where they lie, whatever `context_length`
            is; 0: they gather the blocks of their tables, or have slots.
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

    @property
    def name(self) -> str:
        """Unique among the graphs of an artifact, and its file name's stem."""
        chunk = f"_chunk{self.chunk_size}" if self.has_chunk else ""
        return f"{self.kind}{chunk}_context{self.context_length}"

    @property
    def has_decode(self) -> bool:
        return self.kind != "chunked_prefill"

    @property
    def has_chunk(self) -> bool:
        return self.kind != "token_generation"

    @property
    def tokens(self) -> int:
        """How many a step has room for: decode rows', then chunk rows'."""
        return self.batch_size * self.has_decode + self.ctx_batch_size * self.chunk_size * self.has_chunk

    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in the order in which a compiled graph takes them."""
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
        """What decode rows are told of the owners of blocks; None where they do not attend in place."""
        if self.kv_block_size is None or not self.blocks_in_place or not self.has_decode:
            return None
        row_blocks = self.sequence_length // self.kv_block_size
        return OwnerSizes(self.batch_size, row_blocks, self.blocks_in_place, self.kv_block_size, self.shared_blocks)

    def outputs(self, vocab_size: int) -> tuple[TensorSpec, ...]:
        """All outputs, in the order in which a compiled graph returns them; their shapes never depend on the step."""
        specs = []
        for group, present, rows in (
            (DECODE, self.has_decode, self.batch_size),
            (CHUNK, self.has_chunk, self.ctx_batch_size),
        ):
            if present and self.on_device_sampling:
                specs.append(TensorSpec(f"{group}.tokens", (rows,), "int32"))
            if present and self.returns_logits(group):
                specs.append(TensorSpec(group + LOGITS, (rows, vocab_size), "float32"))
        return tuple(specs)

    def returns_logits(self, group: str) -> bool:
        """Chunk rows always return logits, so that a host can choose the first token of any request."""
        return group == CHUNK or self.decode_logits


def row_counts(config: NeuronConfig) -> dict[str, int]:
    """How many rows each group of a step has, where it has the group."""
    return {DECODE: config.batch_size, CHUNK: config.ctx_batch_size}


def sampler_inputs(group: str, rows: int) -> tuple[TensorSpec, TensorSpec]:
    """What a group's sampler takes beside logits."""
    return (
        TensorSpec(f"{group}.{SAMPLING_PARAMS}", (rows, len(SamplingParams._fields)), "float32"),
        TensorSpec(f"{group}.{UNIFORMS}", (rows,), "float32"),
    )


def graph_specs(config: NeuronConfig) -> tuple[GraphSpec, ...]:
    """All graphs of an artifact: token generation per context bucket; chunked prefill, and with `mixed_step` mixed
    steps, per chunk size and context bucket.

    A context bucket shorter than the chunk it would serve is left out: such a chunk could not fill it.
    """
    with_chunks: tuple[GraphKind, ...] = ("chunked_prefill", "mixed") if config.mixed_step else ("chunked_prefill",)
    specs = []
    for context in config.context_buckets:
        specs.append(_spec(config, "token_generation", 0, context))
        for chunk in config.chunk_sizes:
            if context >= chunk:
                specs += [_spec(config, kind, chunk, context) for kind in with_chunks]
    return tuple(specs)


def _spec(config: NeuronConfig, kind: GraphKind, chunk_size: int, context_length: int) -> GraphSpec:
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
        blocks_in_place=_blocks_in_place(config, kind, context_length),
        shared_blocks=config.shared_blocks if kind != "chunked_prefill" else 0,
    )


def _blocks_in_place(config: NeuronConfig, kind: GraphKind, context_length: int) -> int:
    """Of all blocks, the part that a context is of the longest; beside chunks, all of them, whatever the chunks' context is."""
    if not config.blocks_in_place or kind == "chunked_prefill":
        return 0
    if kind == "mixed":
        return config.kv_blocks
    return -(-config.kv_blocks * context_length // config.sequence_length)


def group_windows(tokens: int, rate: int) -> int:
    """How many groups of `rate` consecutive tokens a row of so many may end, wherever it begins."""
    return -(-tokens // rate)


def state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """All that requests keep, as state tensors.

    Per attention layer, keys and values `[kv_blocks + trash_blocks, kv_heads, block_length, head_dim]`, which are
    `[batch_size + 1, kv_heads, sequence_length, head_dim]` without blocks; per layer that selects keys, its index keys, as those of
    one head; per convolution `[batch_size + 1, past, channels]`;
    per recurrence, in float32, `[batch_size + 1, heads, key_dim, value_dim]`; where the target computes in blocks, once more, with a
    tail `[batch_size + 1, scan_block, width]`, and for all of them `[batch_size + 1]` int32 (ScanState, ScanRows); per compression
    the last tokens of each slot, `[batch_size + rows, 1, spans * rate, width]`, and its keys, `[batch_size + rows, 1,
    sequence_length // rate, key_dim]`, with as many more rows as take what is nobody's.
    """
    return (
        *_layer_states(config, model.layers),
        *_index_states(config, model.selections),
        *slot_state_specs(config, model),
    )


def slot_state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Those of all states that are of all tokens of a slot together: a row for each slot, and behind them those that padding is written to."""
    return (
        *_convolution_states(config, model.convolutions),
        *_recurrent_states(config, model.recurrences),
        *_compression_states(config, model.compressions),
    )


def snapshot_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Where copies of slots' states are kept, in the order of `slot_state_specs`: `[snapshot_places, ...]`. No graph has them."""
    places = config.snapshot_places
    return tuple(
        TensorSpec(f"snapshots.{state.name}", (places, *state.shape[1:]), state.dtype)
        for state in slot_state_specs(config, model)
    )


def _layer_states(config: NeuronConfig, layers: Iterable[LayerCache]) -> Iterable[TensorSpec]:
    for layer in layers:
        for role, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            shape = (config.kv_blocks + config.trash_blocks, layer.kv_heads, config.block_length, dim)
            yield TensorSpec(f"kv_cache.{role}_{layer.layer_idx}", shape, config.dtype)


def _index_states(config: NeuronConfig, selections: Iterable[KeySelection]) -> Iterable[TensorSpec]:
    for each in selections:
        if each.selects(config):
            shape = (config.kv_blocks + config.trash_blocks, 1, config.block_length, each.key_dim)
            yield TensorSpec(f"kv_cache.index_{each.layer_idx}", shape, config.dtype)


def _convolution_states(config: NeuronConfig, convolutions: Iterable[ConvolutionState]) -> Iterable[TensorSpec]:
    for state in convolutions:
        shape = (config.batch_size + 1, state.past, state.channels)
        yield TensorSpec(f"kv_cache.conv_{state.layer_idx}_{state.index}", shape, config.dtype)


def _recurrent_states(config: NeuronConfig, recurrences: tuple[RecurrentState, ...]) -> Iterable[TensorSpec]:
    slots, block = config.batch_size + 1, config.scan_block
    for state in recurrences:
        number = f"{state.layer_idx}_{state.index}"
        shape = (slots, state.heads, state.key_dim, state.value_dim)
        yield TensorSpec(f"kv_cache.state_{number}", shape, "float32")
        if block is not None:
            yield TensorSpec(f"kv_cache.anchor_{number}", shape, "float32")
            yield TensorSpec(f"kv_cache.tail_{number}", (slots, block, state.width), "float32")
    if recurrences and block is not None:
        yield TensorSpec("kv_cache.scanned", (slots,), "int32")


def _compression_states(config: NeuronConfig, compressions: Iterable[Compression]) -> Iterable[TensorSpec]:
    slots, rows = config.batch_size, config.ctx_batch_size
    for each in compressions:
        if each.has_groups(config):
            length, groups = each.spans * each.rate, config.sequence_length // each.rate
            tokens = slots + rows * config.prefill_chunk_size
            windows = slots + rows * group_windows(config.prefill_chunk_size, each.rate)
            for role, taken, columns, dim in (
                ("buffer", tokens, length, each.width),
                ("group", windows, groups, each.key_dim),
            ):
                shape = (slots + -(-taken // columns), 1, columns, dim)
                yield TensorSpec(f"kv_cache.{role}_{each.layer_idx}_{each.index}", shape, config.dtype)
