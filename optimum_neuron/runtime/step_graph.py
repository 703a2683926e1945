# SPDX-License-Identifier: Apache-2.0
"""A step graph with its input tensors, which every step fills anew."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..step.spec import CHUNK, DECODE, GraphSpec
from .block_tables import BlockTables
from .step_tensors import Chunk, DecodeRows, GroupInputs, InputTensors, StepOutput


class StepGraph:
    """What a step needs to know of its graph, found once.

    Attributes:
        inputs: in the order of its spec; the same tensors in every step.
    """

    def __init__(self, graph: GraphSpec, tensors: InputTensors, tables: BlockTables | None) -> None:
        self.name = graph.name
        specs = graph.inputs()
        groups = {
            group: GroupInputs(
                [spec for spec in specs if spec.name.startswith(f"{group}.")],
                tensors,
                tables,
                graph.owner_sizes if group == DECODE else None,
            )
            for group, present in ((DECODE, graph.has_decode), (CHUNK, graph.has_chunk))
            if present
        }
        self._decode, self._chunk = groups.get(DECODE), groups.get(CHUNK)
        self.inputs: list[Tensor] = [tensor for group in groups.values() for tensor in group.tensors]
        # StepOutput's fields are called as a graph's outputs. Behind these there is one more: None.
        names = [each.name.replace(".", "_") for each in graph.outputs(1)]
        self._count = len(names)
        self._chunk_size = graph.chunk_size
        self._places = [names.index(name) if name in names else len(names) for name in StepOutput._fields]

    def fill(
        self, chunks: Sequence[Chunk], decode: DecodeRows | None, slots: Sequence[int], lengths: memoryview
    ) -> list[int]:
        """Sets the inputs for a step, or for idle rows; returns the row of each chunk's last token.

        Args:
            slots: those that decode.
            lengths: of all slots, before the step.

        Raises:
            TooManySharedBlocksError, ValueError: as `GroupInputs.fill_decode`.
        """
        if self._decode is not None:
            self._decode.fill_decode(decode, slots, lengths)
        return [] if self._chunk is None else self._chunk.fill_chunks(chunks, lengths)

    def output(self, outputs: Sequence[Tensor | None], last_rows: list[int]) -> StepOutput:
        """What a run returned, by name.

        Args:
            last_rows: as `fill` returned them.

        Raises:
            ValueError: these are more or fewer than the graph's.
        """
        if len(outputs) != self._count:
            raise ValueError(f"graph {self.name} returned {len(outputs)} outputs, and has {self._count}")
        decode_tokens, decode_logits, chunk_tokens, chunk_logits, prompt_logits = self._places
        every = (*outputs, None)
        output = StepOutput(every[decode_tokens], every[decode_logits], every[chunk_tokens], every[chunk_logits])
        scored = every[prompt_logits]
        if scored is not None:
            output = output._replace(prompt_logits=scored.unflatten(0, (-1, self._chunk_size)))
        if last_rows and last_rows != list(range(len(last_rows))):
            tokens, logits = (each if each is None else each[last_rows] for each in output.of(CHUNK))
            return output._replace(chunk_tokens=tokens, chunk_logits=logits)
        return output
