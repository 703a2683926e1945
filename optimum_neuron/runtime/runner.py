# SPDX-License-Identifier: Apache-2.0
"""GraphRunner: turns "advance these slots" into one run of the smallest step graph that fits.

It owns the length of every slot and refuses what does not fit before anything is written. It knows token ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .. import progress
from ..config import NeuronConfig
from ..step.family import GraphFamily, holds
from ..step.features.shared_blocks.block_owners import TooManySharedBlocksError, rows_apart
from ..step.model_spec import ModelSpec
from ..step.sampling.logprobs import Logprobs, logprobs
from ..step.spec import LOGPROBS, GraphKind, GraphSpec
from ..targets import Executable
from .block_tables import BlockTables
from .kept_states import KeptStates
from .process import OwnProcess
from .step_checks import StepChecks
from .step_graph import StepGraph
from .step_tensors import Chunk, DecodeRows, InputTensors, StepOutput, kept, together


class GraphRunner:
    """Runs the step graphs of one artifact over its slots.

    Args:
        deterministic: run every step in one graph, the largest mixed one. A request's results are then the same to the
            bit whatever else is served, also where graphs of different shapes round differently; every step costs the
            most.
        model: whether slots keep state beside keys and values, and which token ids it takes; None: neither is known or checked.

    Attributes:
        lengths: `[batch_size]`, tokens of each slot that are in the cache. A slot of length 0 is free.
        num_embeddings: as `ModelSpec.num_embeddings`, None where it is not known.
        graph_calls: how often each graph ran.
        family: the graphs, and which of them holds a step.
        kept: which tokens' state snapshots are of, where slots keep state beside keys and values.
        tables: the blocks that each slot has; None where the cache has no blocks, and a slot room for `sequence_length` tokens.
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
        self._lengths = self.lengths.data  # of which a token reads a few, without numpy
        self.graph_calls: Counter[str] = Counter()
        self.family = GraphFamily(graphs, deterministic=deterministic)
        self.deterministic = deterministic
        self.kept = KeptStates(executable, config, model)
        self.num_embeddings = None if model is None else model.num_embeddings
        # What a model chooses it can be given, but for those with more logits than embeddings.
        checks_decodes = model is not None and model.vocab_size > model.num_embeddings
        self.runs_ahead = executable.runs_ahead and config.on_device_sampling and not checks_decodes
        self.process = OwnProcess()
        self._warm = False
        self.tables = BlockTables(config) if config.kv_block_size else None
        self._checks = StepChecks(
            config, self._lengths, self.tables, self.family.has_mixed, self.num_embeddings, checks_decodes
        )
        tensors = InputTensors()
        self._graphs = {graph.name: StepGraph(graph, tensors, self.tables) for graph in self.family}

    def reset(self, slot: int) -> None:
        """Frees a slot, and its blocks. What they hold stays as it is: no mask ever shows it to the next request."""
        self.lengths[slot] = 0
        if self.tables is not None:
            self.tables.clear(slot)

    def reset_all(self) -> None:
        """Frees all slots."""
        self.lengths.fill(0)
        if self.tables is not None:
            self.tables.clear_all()

    def reserve(self, tokens: Sequence[int]) -> None:
        """Makes room for so many tokens in each of the first slots, for a caller who plans no blocks; all slots are freed.

        Raises:
            ValueError: the cache's blocks do not hold them. No slot is changed.
        """
        if self.tables is not None:
            self.tables.reserve(tokens)
        self.lengths.fill(0)

    def assign(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Gives a slot blocks of the cache, from its block `first` on; several slots may have one that none of them writes to.

        Raises:
            ValueError: a block does not exist, or the slot has fewer than `first`, or the artifact has no blocks.
        """
        self._blocks().assign(slot, first, blocks)

    def resume(self, slot: int, length: int, snapshot: int | None = None) -> None:
        """Makes a slot hold the first `length` tokens that its blocks contain already.

        Args:
            snapshot: of these tokens, where slots keep state beside keys and values.

        Raises:
            ValueError: it has fewer blocks, or the model's state is not in them, and the snapshot is of other tokens.
        """
        room = int(self._blocks().capacity[slot])
        if not 1 <= length <= room:
            raise ValueError(f"slot {slot} has blocks of {room} tokens: {length} of them cannot be resumed")
        self.kept.check(slot, length, snapshot)
        self.kept.restore(snapshot, slot)
        self.lengths[slot] = length

    def copy_block(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` tokens of a block into another, on the device.

        Raises:
            ValueError: a block does not exist, or has fewer tokens.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        self.process.check()
        blocks, most = self._blocks().block_length, self.config.kv_blocks
        if not (0 <= source < most and 0 <= destination < most and 1 <= length <= blocks):
            raise ValueError(
                f"{length} tokens of block {source} cannot be copied to block {destination}: there are {most} blocks of {blocks}"
            )
        self.executable.copy_slot(source, destination, length)

    def _blocks(self) -> BlockTables:
        if self.tables is None:
            raise ValueError(
                "this artifact's cache has slots, not blocks; export it with --kv-block-size (kv_block_size=128)"
            )
        return self.tables

    def reuse(self, slot: int, source: int, length: int, snapshot: int | None = None) -> None:
        """Makes a slot hold the first `length` tokens of another, copied on the device, or of itself.

        Args:
            snapshot: of these tokens, where slots keep state beside keys and values; a slot that goes on behind all its own tokens
                needs none.

        Raises:
            ValueError: the source holds fewer tokens, or the snapshot is of others, or the cache has blocks. No slot is changed.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        self.process.check()
        if snapshot is not None or source != slot or length != self.lengths[slot]:
            self.kept.check(slot, length, snapshot)
        if self.tables is not None:
            raise ValueError(
                f"slot {source} cannot be copied to slot {slot}: this artifact's cache has blocks; assign blocks, and resume"
            )
        if not 1 <= length <= self.lengths[source]:
            raise ValueError(f"slot {source} holds {self.lengths[source]} tokens: {length} of them cannot be reused")
        if source != slot:
            self.executable.copy_slot(source, slot, length)
        self.kept.restore(snapshot, slot)
        self.lengths[slot] = length

    def keep_state(self, slot: int, snapshot: int) -> None:
        """Copies what a slot keeps beside keys and values, of all its tokens, to the place of a snapshot.

        Raises:
            ValueError: there is no such place, or the slot has no tokens.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        self.process.check()
        self.kept.keep(slot, int(self.lengths[slot]), snapshot)

    def warm_up(self) -> None:
        """Take the memory of all states and run every graph with idle rows, the first time that it is called.

        Else the first request of each slot waits for memory, and the first run of a graph is slow. So are the first of those that only
        some requests need: samplers, log-probabilities, copies of slots.
        """
        self.process.check()
        if self._warm:
            return
        self._warm = True
        others = self.executable.idle_inputs()
        with progress.stage("Warming up", len(self._graphs) + len(others)) as advance:
            self.executable.touch_states()
            for name, step in self._graphs.items():
                step.fill((), None, (), self._lengths)
                self.executable.run(name, step.inputs)
                advance(name)
            for name, inputs in others.items():
                self.executable.run(name, inputs)
                advance(name)

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
        outputs: bool = True,
    ) -> StepOutput:
        """Advances prompts by a chunk each and active slots by one token each, all in one run of one graph.

        Args:
            graph: the one that whoever planned the step chose; None: what `family` selects. Without chunks it is of the
                kind token generation, without decode rows chunked prefill, with both mixed.
            logits: whether somebody reads logits; where nobody does they need not leave a device.
            outputs: whether somebody reads any output; where nobody does the step need not compute them.

        Raises:
            ValueError: a slot twice, or chunks that fit no graph or no slot, or an active slot that is full, or both
                groups and no mixed graph, or a graph that does not hold the step, or a token id that the model does not
                take. No slot is changed.
            RuntimeError: the process was forked since the graphs were loaded.
        """
        given = _Given(chunks, decode, () if decode is None else decode.slots(), graph)
        if self.executable.runs_ahead:
            output = self._launch(given, logits=logits)()
        else:
            output = self._run(given, outputs=outputs)
        self._advance(given)
        return output

    def start(
        self, chunks: Sequence[Chunk] = (), decode: DecodeRows | None = None, *, logits: bool = True
    ) -> Callable[[], StepOutput]:
        """As `step` where `runs_ahead`, and returns before its end: what is returned waits for that.

        Slots count as longer from here on, also where the step then fails.
        """
        given = _Given(chunks, decode, () if decode is None else decode.slots(), None)
        wait = self._launch(given, logits=logits)
        self._advance(given)
        return wait

    def _run(self, given: _Given, *, outputs: bool) -> StepOutput:
        try:
            step, last_rows = self._prepare(given)
        except TooManySharedBlocksError:
            # One after the other, each with the memory of the one before.
            return together([(each.active, kept(self._run(each, outputs=outputs))) for each in self._apart(given)])
        if not outputs:
            self.executable.run_for_states(step.name, step.inputs)
            return StepOutput()
        return step.output(self.executable.run(step.name, step.inputs), last_rows)

    def _launch(self, given: _Given, *, logits: bool) -> Callable[[], StepOutput]:
        """Starts a step where the executable runs ahead; what is returned waits for its end."""
        try:
            step, last_rows = self._prepare(given)
        except TooManySharedBlocksError:
            waits = [(each.active, self._launch(each, logits=logits)) for each in self._apart(given)]
            return lambda: together([(active, wait()) for active, wait in waits])
        wait = self.executable.start(step.name, step.inputs, logits=logits)
        return lambda: step.output(wait(), last_rows)

    def _apart(self, given: _Given) -> Iterator[_Given]:
        """A step as several, as its decode rows share more blocks than a graph has places for; chunks are in the first one."""
        chunks, decode, _, graph = given
        sizes = self.family.kind("token_generation")[-1].owner_sizes
        assert decode is not None and self.tables is not None and sizes is not None
        groups = rows_apart(sizes, self.tables.blocks, self.tables.read_blocks(decode.active, self.lengths))
        # Rows that read no block fit everywhere.
        alone = decode.active & (self.lengths == 0)
        for number, rows in enumerate(groups):
            active = np.isin(np.arange(self.config.batch_size), rows) | (alone if number == 0 else False)
            part = decode._replace(active=active)
            yield _Given(() if number else chunks, part, part.slots(), None if number else graph)

    def _prepare(self, given: _Given) -> tuple[StepGraph, list[int]]:
        """Checks a step, and fills the inputs of its graph; returns that, and the rows of chunks' last tokens."""
        chunks, decode, slots, graph = given
        self.process.check()
        longest = 0 if decode is None else self._checks.decode(decode, slots, chunks)
        if chunks or decode is None:
            self._checks.chunks(chunks)
        step = self._graphs[self._select(chunks, decode, longest, graph).name]
        last_rows = step.fill(chunks, decode, slots, self._lengths)
        self.graph_calls[step.name] += 1
        return step, last_rows

    def _advance(self, given: _Given) -> None:
        lengths = self._lengths
        for chunk in given.chunks:
            lengths[chunk.slot] += len(chunk.token_ids)
        for slot in given.slots:
            lengths[slot] += 1

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
            raise ValueError("this artifact has no log-probabilities; export it with --top-logprobs (top_logprobs=0)")
        tokens, logits = output.of(group)
        assert tokens is not None
        if logits is not None:
            return logprobs(logits[list(rows)], tokens[list(rows)], count)
        found = [each[list(rows)] for each in self.executable.run(LOGPROBS, [tokens])]
        if not count:
            found += [tokens.new_empty(len(rows), 0), found[0].new_empty(len(rows), 0)]
        return Logprobs(*found)

    def _select(
        self, chunks: Sequence[Chunk], decode: DecodeRows | None, longest: int, graph: GraphSpec | None
    ) -> GraphSpec:
        """The graph of a step whose decode rows hold up to `longest` tokens each."""
        context, blocks = 1, 0
        in_place = self.family.in_place
        if decode is not None and in_place and self.tables is not None:
            blocks = self.tables.last_block(decode.active, self.lengths) + 1
        elif decode is not None:
            context = longest + 1
        for chunk in chunks:
            context = max(context, int(self.lengths[chunk.slot]) + len(chunk.token_ids))
        counts = [len(chunk.token_ids) for chunk in chunks]
        if graph is None:
            kind: GraphKind = "token_generation" if not chunks else "chunked_prefill" if decode is None else "mixed"
            return self.family.select(kind, context, counts, blocks)
        has_groups = graph.has_decode >= (decode is not None) and graph.has_chunk >= bool(chunks)
        if not has_groups or graph not in self.family or not holds(graph, context, counts, blocks):
            raise ValueError(
                f"the graph {graph.name} does not hold a step of prompt chunks of {counts} tokens at a context of {context}"
                f"{'' if decode is None else ' with decode rows'}"
            )
        return graph


class _Given(NamedTuple):
    """What a step was asked for: arguments of `GraphRunner.step`, and the slots that decode."""

    chunks: Sequence[Chunk]
    decode: DecodeRows | None
    slots: Sequence[int]
    graph: GraphSpec | None

    @property
    def active(self) -> np.ndarray:
        assert self.decode is not None
        return self.decode.active
