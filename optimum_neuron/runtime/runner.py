# SPDX-License-Identifier: Apache-2.0
"""GraphRunner: turns "advance these slots" into one run of the smallest step graph that fits.

It owns the length of every slot and refuses what does not fit before anything is written. It knows token ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .. import progress
from ..config import NeuronConfig
from ..core import PromptPiece, StepOutput
from ..step.block_owners import TooManySharedBlocksError, rows_apart
from ..step.family import GraphFamily
from ..step.model_spec import ModelSpec
from ..step.spec import LOGPROBS, GraphSpec
from ..targets import Executable
from .block_tables import BlockTables
from .kept_states import KeptStates
from .logprobs import TokenLogprobs, score_tokens
from .process import OwnProcess
from .step_checks import GivenStep, StepChecks
from .step_tensors import DecodeRows, InputArrays, StepGraph, copy_output, join_outputs


class GraphRunner:
    """The step graphs of one artifact over its slots.

    In a process that was forked since it was made nothing runs, and no slot is copied: methods raise RuntimeError.

    Args:
        model: whether slots keep state next to keys and values, and which token ids it takes; None: neither is known or checked.
        deterministic: run every step in one graph, the largest mixed one. A request's results are then the same to the bit whatever
            else is served, also where graphs of different shapes round differently; every step costs the most.

    Attributes:
        lengths: `[batch_size]`, tokens of each slot that are in the cache. A slot of length 0 is free.
        graph_calls: how often each graph ran.
        family: the graphs, and which of them holds a step.
        kept: copies of the state that slots keep next to keys and values.
        tables: the blocks of each slot; None where a slot is one block of its own.
        runs_ahead: whether `start_step` may be called, and FROM_SLOT be a token.
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
        self._lengths = self.lengths.data  # a token reads a few of them, without numpy
        self.graph_calls: Counter[str] = Counter()
        self.family = GraphFamily(graphs, deterministic=deterministic)
        self.deterministic = deterministic
        self.kept = KeptStates(executable, config, model)
        self.num_embeddings = None if model is None else model.num_embeddings
        # A model takes what it chooses, but for those with more logits than embeddings.
        checks_decodes = model is not None and model.vocab_size > model.num_embeddings
        self.runs_ahead = executable.runs_ahead and config.on_device_sampling and not checks_decodes
        self.process = OwnProcess()
        self._warm = False
        self.tables = BlockTables(config) if config.kv_block_size else None
        self._checks = StepChecks(config, self._lengths, self.tables, self.family, self.num_embeddings, checks_decodes)
        arrays: InputArrays = {}
        self._graphs = {graph.name: StepGraph(graph, arrays, self.tables) for graph in self.family}

    def reset_slot(self, slot: int) -> None:
        """Free a slot and its blocks. Their contents stay: no mask ever shows them to the next request."""
        self.lengths[slot] = 0
        if self.tables is not None:
            self.tables.clear_row(slot)

    def reset_slots(self) -> None:
        """Free all slots."""
        self.lengths.fill(0)
        if self.tables is not None:
            self.tables.clear_rows()

    def reserve_slots(self, tokens: Sequence[int]) -> None:
        """Free all slots and make room for so many tokens in each of the first, for a caller who plans no blocks.

        Raises ValueError if the cache's blocks do not hold them. No slot is changed then.
        """
        if self.tables is not None:
            self.tables.reserve_rows(tokens)
        self.lengths.fill(0)

    def assign_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Give a slot blocks of the cache, from its block `first` on; several slots may share one that none of them writes.

        Without blocks in the cache, slot i has block i and no other. Raises ValueError for a block that does not exist, or a slot with
        fewer than `first`.
        """
        if self.tables is not None:
            self.tables.assign_blocks(slot, first, blocks)
        elif first or list(blocks) != [slot]:
            raise ValueError(
                f"slot {slot} is given blocks {list(blocks)}, and this artifact's cache has slots, not blocks; export it with "
                f"--kv-block-size (kv_block_size=128)"
            )

    def resume_slot(self, slot: int, length: int, place: int | None = None) -> None:
        """Make a slot hold the first `length` tokens that its blocks contain already.

        Args:
            place: has the copy of the state after them, where slots keep state next to keys and values.

        Raises ValueError if it has fewer blocks, or the model's state is not in them, and the copy has other tokens.
        """
        self.process.check_fork()
        room = self.config.sequence_length if self.tables is None else int(self.tables.capacity[slot])
        if not 1 <= length <= room:
            raise ValueError(f"slot {slot} has room for {room} tokens: {length} of them cannot be resumed")
        self.kept.check_copy(slot, length, place)
        if place is not None:
            self.kept.restore_copy(place, slot)
        self.lengths[slot] = length

    def copy_block(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` tokens of a block, or slot, into another, on the device; raise ValueError where there are none."""
        self.process.check_fork()
        size, most = self.config.block_length, self.config.kv_blocks
        if not (0 <= source < most and 0 <= destination < most and 1 <= length <= size):
            raise ValueError(
                f"{length} tokens of block {source} cannot be copied to block {destination}: there are {most} blocks of {size}"
            )
        self.executable.copy_slot(source, destination, length)

    def keep_state(self, slot: int, place: int) -> None:
        """Copy what a slot keeps next to keys and values to a place; raise ValueError where there is none, or the slot is empty."""
        self.process.check_fork()
        self.kept.keep_copy(slot, int(self.lengths[slot]), place)

    def warm_up(self) -> None:
        """Take the memory of all states and run every graph with idle rows, the first time that it is called.

        Else the first request of each slot waits for memory, and the first run of each graph is slow.
        """
        self.process.check_fork()
        if self._warm:
            return
        self._warm = True
        others = self.executable.idle_inputs()
        with progress.stage("Warming up", len(self._graphs) + len(others)) as advance:
            self.executable.touch_states()
            for name, step in self._graphs.items():
                step.fill_inputs((), None, (), self._lengths)
                self.executable.run(name, step.inputs)
                advance(name)
            for name, inputs in others.items():
                self.executable.run(name, inputs)
                advance(name)

    def run_step(
        self,
        pieces: Sequence[PromptPiece] = (),
        decode: DecodeRows | None = None,
        graph: GraphSpec | None = None,
        *,
        logits: bool = True,
        outputs: bool = True,
    ) -> StepOutput:
        """Advance prompts by a piece each and active slots by one token each, all in one run of one graph.

        Args:
            pieces: each continues where its slot's tokens end.
            graph: the one that the step was planned for; None: what `family` selects. Without pieces it has the
                kind token generation, without decode rows chunked prefill, with both mixed.
            logits: whether the caller reads logits; otherwise they need not leave a device.
            outputs: whether the caller reads any output; otherwise the step need not compute them.

        Raises ValueError for a step that fits no graph or slot, or a token id that the model does not take. No slot is changed.
        """
        given = GivenStep.from_arguments(pieces, decode, graph)
        if self.executable.runs_ahead:
            output = self._launch_graph(given, logits=logits)()
        else:
            output = self._run_graph(given, outputs=outputs)
        self._advance_lengths(given)
        return output

    def start_step(
        self, pieces: Sequence[PromptPiece] = (), decode: DecodeRows | None = None, *, logits: bool = True
    ) -> Callable[[], StepOutput]:
        """Start a step as `run_step` does, where `runs_ahead`; return what waits for its end and returns its output.

        Slots count as longer from here on, even where the step then fails.
        """
        given = GivenStep.from_arguments(pieces, decode)
        wait = self._launch_graph(given, logits=logits)
        self._advance_lengths(given)
        return wait

    def _run_graph(self, given: GivenStep, *, outputs: bool) -> StepOutput:
        try:
            step, last_rows = self._prepare_step(given)
        except TooManySharedBlocksError:
            # One after the other, each with the memory of the one before.
            parts = self._split_step(given)
            return join_outputs([(each.active, copy_output(self._run_graph(each, outputs=outputs))) for each in parts])
        if not outputs:
            self.executable.run_for_states(step.name, step.inputs)
            return StepOutput()
        return step.name_outputs(self.executable.run(step.name, step.inputs), last_rows)

    def _launch_graph(self, given: GivenStep, *, logits: bool) -> Callable[[], StepOutput]:
        """Start a step where the executable runs ahead; return what waits for its end."""
        try:
            step, last_rows = self._prepare_step(given)
        except TooManySharedBlocksError:
            waits = [(each.active, self._launch_graph(each, logits=logits)) for each in self._split_step(given)]
            return lambda: join_outputs([(active, wait()) for active, wait in waits])
        wait = self.executable.start(step.name, step.inputs, logits=logits)
        return lambda: step.name_outputs(wait(), last_rows)

    def _split_step(self, given: GivenStep) -> Iterator[GivenStep]:
        """Yield a step in parts, as its decode rows share more blocks than a graph has places for; the first part has the pieces."""
        pieces, decode, _, graph = given
        sizes = self.family.kind("token_generation")[-1].owner_sizes
        assert decode is not None and self.tables is not None and sizes is not None
        groups = rows_apart(sizes, self.tables.blocks, self.tables.read_blocks(decode.active, self.lengths))
        # Rows that read no block fit everywhere.
        alone = decode.active & (self.lengths == 0)
        for number, rows in enumerate(groups):
            active = np.isin(np.arange(self.config.batch_size), rows) | (alone if number == 0 else False)
            yield GivenStep.from_arguments(
                () if number else pieces, decode._replace(active=active), None if number else graph
            )

    def _prepare_step(self, given: GivenStep) -> tuple[StepGraph, list[int]]:
        """Check a step and fill the inputs of its graph; return that, and the rows of pieces' last tokens."""
        pieces, decode, slots, graph = given
        self.process.check_fork()
        longest = 0 if decode is None else self._checks.check_decode(decode, slots, pieces)
        if pieces or decode is None:
            self._checks.check_pieces(pieces)
        step = self._graphs[self._checks.select_graph(pieces, decode, longest, graph).name]
        last_rows = step.fill_inputs(pieces, decode, slots, self._lengths)
        self.graph_calls[step.name] += 1
        return step, last_rows

    def _advance_lengths(self, given: GivenStep) -> None:
        lengths = self._lengths
        for piece in given.pieces:
            lengths[piece.slot] += piece.count
        for slot in given.slots:
            lengths[slot] += 1

    def find_logprobs(self, group: str, rows: Sequence[int], output: StepOutput) -> TokenLogprobs:
        """Return the log-probabilities of the tokens that the last step chose for rows of DECODE or CHUNK, a part of its `output`.

        Raises ValueError if the artifact was exported without `top_logprobs`.
        """
        count = self.config.top_logprobs
        if count is None:
            raise ValueError("this artifact has no log-probabilities; export it with --top-logprobs (top_logprobs=0)")
        tokens, logits = output.of_group(group)
        assert tokens is not None
        if logits is not None:
            return score_tokens(logits[list(rows)], tokens[list(rows)], count)
        found = [each[list(rows)] for each in self.executable.run(LOGPROBS, [tokens])]
        if not count:
            found += [np.empty((len(rows), 0), np.int32), np.empty((len(rows), 0), np.float32)]
        return TokenLogprobs(*found)
