# SPDX-License-Identifier: Apache-2.0
"""GraphRunner: turns "advance these slots" into one run of the smallest step graph that fits.

It owns the length of every slot and refuses what does not fit before anything is written. It knows token ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from torch import Tensor

from ..config import NeuronConfig
from ..graphs.family import GraphFamily, holds, rows_needed
from ..graphs.logprobs import Logprobs, logprobs
from ..graphs.spec import CHUNK, DECODE, LOGPROBS, GraphKind, GraphSpec, ModelSpec
from ..targets import AheadExecutable, Executable
from .process import OwnProcess
from .step_tensors import IDLE, Chunk, DecodeRows, GroupInputs, StepOutput
from .token_ids import check_token_ids


class GraphRunner:
    """Runs the step graphs of one artifact over its slots.

    Args:
        deterministic: run every step in one graph, the largest mixed one. A request's results are then the same to the
            bit whatever else is served, also where graphs of different shapes round differently; every step costs the
            most.
        model: whether its prefixes can be reused, and which token ids it takes; None checks neither.

    Attributes:
        lengths: `[batch_size]`, tokens of each slot that are in the cache. A slot of length 0 is free.
        num_embeddings: as `ModelSpec.num_embeddings`, None where it is not known.
        graph_calls: how often each graph ran.
        family: the graphs, and which of them holds a step.
        runs_ahead: whether `start` may be called, and FROM_SLOT be a token.
        process: where it was made: nothing runs, and no slot is copied, in a process that was forked since.
    """

    def __init__(
        self,
        executable: Executable,
        config: NeuronConfig,
        graphs: Sequence[GraphSpec],
        model: ModelSpec | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.executable = executable
        self.config = config
        self.lengths = np.zeros(config.batch_size, dtype=np.int32)
        self.graph_calls: Counter[str] = Counter()
        self.family = GraphFamily(graphs, deterministic=deterministic)
        self.deterministic = deterministic
        self.reuses_prefixes = model is None or model.reuses_prefixes
        self.num_embeddings = None if model is None else model.num_embeddings
        # What a model chooses it can be given, but for those with more logits than embeddings.
        self._checks_decodes = model is not None and model.vocab_size > model.num_embeddings
        self.runs_ahead = executable.runs_ahead and config.on_device_sampling and not self._checks_decodes
        self.process = OwnProcess()
        self._warm = False
        self._decode = GroupInputs(self.family.kind("token_generation")[0].inputs())
        self._chunks = {graph.chunk_size: GroupInputs(graph.inputs()) for graph in self.family.kind("chunked_prefill")}

    def reset(self, slot: int) -> None:
        """Frees a slot. Its cache rows stay as they are: no mask ever shows them to the next request."""
        self.lengths[slot] = 0

    def reset_all(self) -> None:
        """Frees all slots."""
        self.lengths.fill(0)

    def reuse(self, slot: int, source: int, length: int) -> None:
        """Makes a slot hold the first `length` tokens of another, copied on the device, or of itself.

        Raises:
            ValueError: the source holds fewer tokens, or more than cache rows. No slot is changed.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        self.process.check()
        if not self.reuses_prefixes:
            raise ValueError(
                f"slot {source} keeps state of all its {self.lengths[source]} tokens together: the first {length} of them "
                f"cannot be reused; reset the slot and compute them again"
            )
        if not 1 <= length <= self.lengths[source]:
            raise ValueError(f"slot {source} holds {self.lengths[source]} tokens: {length} of them cannot be reused")
        if source != slot:
            self.executable.copy_slot(source, slot, length)
        self.lengths[slot] = length

    def warm_up(self) -> None:
        """Runs every graph with idle rows, the first time that it is called: the first run of a graph is slow."""
        self.process.check()
        if self._warm:
            return
        self._warm = True
        self._decode.position_ids.fill(IDLE)
        for graph in self.family:
            inputs = list(self._decode.tensors) if graph.has_decode else []
            if graph.has_chunk:
                self._chunks[graph.chunk_size].fill_chunks((), self.lengths)
                inputs += self._chunks[graph.chunk_size].tensors
            self.executable.run(graph.name, inputs)

    def prefill(self, chunks: Sequence[Chunk]) -> StepOutput:
        """A step without decode rows."""
        return self.step(chunks)

    def decode(
        self, token_ids: np.ndarray, active: np.ndarray, sampling_params: np.ndarray, uniforms: np.ndarray
    ) -> StepOutput:
        """A step without chunks; the arguments are those of `DecodeRows`."""
        return self.step((), DecodeRows(token_ids, active, sampling_params, uniforms))

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        decode: DecodeRows | None = None,
        graph: GraphSpec | None = None,
        *,
        logits: bool = True,
    ) -> StepOutput:
        """Advances prompts by a chunk each and active slots by one token each, all in one run of one graph.

        Args:
            graph: the one that whoever planned the step chose; None: what `family` selects. Without chunks it is of the
                kind token generation, without decode rows chunked prefill, with both mixed.
            logits: whether somebody reads logits; where nobody does they need not leave a device.

        Raises:
            ValueError: a slot twice, or chunks that fit no graph or no slot, or an active slot that is full, or both
                groups and no mixed graph, or a graph that does not hold the step, or a token id that the model does not
                take. No slot is changed.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        graph, inputs, last_rows = self._inputs(chunks, decode, graph)
        if self.executable.runs_ahead:
            ahead = cast(AheadExecutable, self.executable)
            outputs = ahead.start(graph.name, inputs, logits=logits)()
        else:
            outputs = self.executable.run(graph.name, inputs)
        self._advance(chunks, decode)
        return self._collect(graph, outputs, last_rows)

    def start(
        self, chunks: Sequence[Chunk] = (), decode: DecodeRows | None = None, *, logits: bool = True
    ) -> Callable[[], StepOutput]:
        """As `step` where `runs_ahead`, and returns before its end: what is returned waits for that.

        Slots count as longer from here on, also where the step then fails.
        """
        graph, inputs, last_rows = self._inputs(chunks, decode, None)
        wait = cast(AheadExecutable, self.executable).start(graph.name, inputs, logits=logits)
        self._advance(chunks, decode)
        return lambda: self._collect(graph, wait(), last_rows)

    def _inputs(
        self, chunks: Sequence[Chunk], decode: DecodeRows | None, graph: GraphSpec | None
    ) -> tuple[GraphSpec, list[Tensor], list[int]]:
        """The graph of a step, what it is given, and the rows of chunks' last tokens."""
        self.process.check()
        if decode is not None:
            self._check_decode(decode, chunks)
        if chunks or decode is None:
            self._check_chunks(chunks)
        graph = self._select(chunks, decode, graph)
        inputs: list[Tensor] = []
        last_rows: list[int] = []
        if graph.has_decode:
            self._fill_decode(decode)
            inputs += self._decode.tensors
        if graph.has_chunk:
            group = self._chunks[graph.chunk_size]
            last_rows = group.fill_chunks(chunks, self.lengths)
            inputs += group.tensors
        self.graph_calls[graph.name] += 1
        return graph, inputs, last_rows

    def _advance(self, chunks: Sequence[Chunk], decode: DecodeRows | None) -> None:
        for chunk in chunks:
            self.lengths[chunk.slot] += len(chunk.token_ids)
        if decode is not None:
            self.lengths += decode.active

    def logprobs(self, group: str, rows: Sequence[int], output: StepOutput) -> Logprobs:
        """Log-probabilities of the tokens that the last step chose, in the order of `rows`.

        Args:
            group: DECODE or CHUNK.
            rows: of the group's part of `output`, which is the last step's.

        Raises:
            ValueError: the artifact was exported without `top_logprobs`.
        """
        count = self.config.top_logprobs
        if count is None:
            raise ValueError(
                "this artifact tells no log-probabilities; export it with --top-logprobs (top_logprobs=0)"
            )
        tokens, logits = output.of(group)
        assert tokens is not None
        if logits is not None:
            return logprobs(logits[list(rows)], tokens[list(rows)], count)
        found = [each[list(rows)] for each in self.executable.run(LOGPROBS, [tokens])]
        if not count:
            found += [tokens.new_empty(len(rows), 0), found[0].new_empty(len(rows), 0)]
        return Logprobs(*found)

    def _fill_decode(self, decode: DecodeRows | None) -> None:
        if decode is None:
            self._decode.position_ids.fill(IDLE)
        else:
            self._decode.fill_decode(decode, self.lengths)

    def _select(self, chunks: Sequence[Chunk], decode: DecodeRows | None, graph: GraphSpec | None) -> GraphSpec:
        context = 1
        if decode is not None:
            context = int(self.lengths[decode.active].max(initial=0)) + 1
        for chunk in chunks:
            context = max(context, int(self.lengths[chunk.slot]) + len(chunk.token_ids))
        counts = [len(chunk.token_ids) for chunk in chunks]
        if graph is None:
            kind: GraphKind = "token_generation" if not chunks else "chunked_prefill" if decode is None else "mixed"
            return self.family.select(kind, context, counts)
        has_groups = graph.has_decode >= (decode is not None) and graph.has_chunk >= bool(chunks)
        if not has_groups or graph not in self.family or not holds(graph, context, counts):
            raise ValueError(
                f"the graph {graph.name} does not hold a step of prompt chunks of {counts} tokens at a context of {context}"
                f"{'' if decode is None else ' beside decode rows'}"
            )
        return graph

    def _check_decode(self, decode: DecodeRows, chunks: Sequence[Chunk]) -> None:
        if int(self.lengths[decode.active].max(initial=0)) >= self.config.sequence_length:
            slot = int(np.argmax(np.where(decode.active, self.lengths, IDLE)))
            raise ValueError(f"slot {slot} is full: it holds sequence_length={self.config.sequence_length} tokens")
        if self._checks_decodes:
            self._check_ids(decode.token_ids, "a decode row")
        if chunks and not self.family.has_mixed:
            raise ValueError(
                "this artifact has no mixed graph: decode and take in chunks in steps of their own, or export it with "
                "--batch-size 2 or more and without --no-mixed-step"
            )
        for chunk in chunks:
            if 0 <= chunk.slot < self.config.batch_size and decode.active[chunk.slot]:
                raise ValueError(f"slot {chunk.slot} cannot decode and take a chunk in the same step")

    def _check_chunks(self, chunks: Sequence[Chunk]) -> None:
        sizes = self.config
        slots = [chunk.slot for chunk in chunks]
        rows = rows_needed((len(chunk.token_ids) for chunk in chunks), sizes.prefill_chunk_size)
        if not chunks or rows > sizes.ctx_batch_size or len(set(slots)) != len(slots):
            raise ValueError(
                f"a step takes 1 to ctx_batch_size={sizes.ctx_batch_size} rows of prefill_chunk_size="
                f"{sizes.prefill_chunk_size} tokens, each slot once, not {rows} rows of the slots {slots}"
            )
        for chunk in chunks:
            if not 0 <= chunk.slot < sizes.batch_size:
                raise ValueError(
                    f"slot {chunk.slot} does not exist: the slots of batch_size={sizes.batch_size} start at 0"
                )
            count, start = len(chunk.token_ids), int(self.lengths[chunk.slot])
            if count < 1:
                raise ValueError(f"the chunk of slot {chunk.slot} has no token; give it at least 1")
            self._check_ids(chunk.token_ids, f"the chunk of slot {chunk.slot}")
            if start + count > sizes.sequence_length:
                raise ValueError(
                    f"slot {chunk.slot} holds {start} tokens and cannot take {count} more: "
                    f"sequence_length={sizes.sequence_length}"
                )

    def _check_ids(self, token_ids: np.ndarray, whose: str) -> None:
        if self.num_embeddings is not None:
            check_token_ids(token_ids, self.num_embeddings, whose)

    @staticmethod
    def _collect(graph: GraphSpec, outputs: Sequence[Tensor | None], last_rows: list[int]) -> StepOutput:
        named = {}
        rest = iter(outputs)
        in_order = last_rows == list(range(len(last_rows)))
        for group, present in ((DECODE, graph.has_decode), (CHUNK, graph.has_chunk)):
            for name, returned in (("tokens", graph.on_device_sampling), ("logits", graph.returns_logits(group))):
                if present and returned:
                    tensor = next(rest)
                    if tensor is None:  # it stays on the device
                        continue
                    named[f"{group}_{name}"] = tensor if group == DECODE or in_order else tensor[last_rows]
        return StepOutput(**named)
