# SPDX-License-Identifier: Apache-2.0
"""The choice of the graph for a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .spec import GraphKind, GraphSpec


def rows_needed(counts: Iterable[int], chunk_size: int) -> int:
    """Return the chunk rows of prompts that advance by `counts` tokens each: a row never holds two prompts."""
    return sum(-(-count // chunk_size) for count in counts)


def holds(graph: GraphSpec, context_length: int, counts: Sequence[int] = (), blocks: int = 0) -> bool:
    """Return whether a graph with the groups that a step needs has columns, chunk rows and blocks enough; see `select`."""
    # Chunk size 0 has no rows to count.
    fits = not counts or rows_needed(counts, graph.chunk_size) <= graph.ctx_batch_size
    reaches = not graph.blocks_in_place or blocks <= graph.blocks_in_place
    return fits and reaches and graph.context_length >= context_length


class GraphFamily:
    """The graphs of an artifact, to find the smallest one that holds a step.

    `deterministic` always chooses the largest mixed graph, of those that score prompts the largest; ValueError where none is mixed.
    `in_place` is whether decode rows attend over blocks in place: then `blocks` counts for them, not their contexts.
    """

    def __init__(self, graphs: Sequence[GraphSpec], *, deterministic: bool = False) -> None:
        self._by_kind: dict[GraphKind, list[GraphSpec]] = {}
        for graph in sorted(graphs, key=lambda graph: (graph.chunk_size, graph.context_length)):
            self._by_kind.setdefault(graph.kind, []).append(graph)
        self.has_mixed = "mixed" in self._by_kind
        self.in_place = any(graph.blocks_in_place for graph in self.kind("token_generation"))
        if deterministic and not self.has_mixed:
            raise ValueError(
                "deterministic=True runs every step in the mixed graph, and this artifact has none; export it with "
                "--batch-size 2 or more and without --no-mixed-step"
            )
        self._only = self._by_kind["mixed"][-1:] if deterministic else None

    def __contains__(self, graph: GraphSpec) -> bool:
        return graph in self._by_kind.get(graph.kind, ())

    def __iter__(self) -> Iterator[GraphSpec]:
        return (graph for graphs in self._by_kind.values() for graph in graphs)

    def kind(self, kind: GraphKind) -> Sequence[GraphSpec]:
        """Return all graphs of a kind, the smallest first."""
        return self._by_kind.get(kind, ())

    def chunk_sizes(self, kind: GraphKind) -> tuple[int, ...]:
        return tuple(sorted({graph.chunk_size for graph in self._usable_graphs(kind)}))

    def select(self, kind: GraphKind, context_length: int, counts: Sequence[int] = (), blocks: int = 0) -> GraphSpec:
        """Return the smallest graph of a kind that holds a step, or raise ValueError.

        Args:
            context_length: cache columns that the step's tokens see, the largest of its rows; where `in_place`, of its chunk rows.
            counts: tokens by which each prompt of the step advances.
            blocks: one more than the highest block that decode rows read.
        """
        for graph in self._usable_graphs(kind):
            if holds(graph, context_length, counts, blocks):
                return graph
        raise ValueError(
            f"no {kind} graph holds prompt chunks of {list(counts)} tokens at a context of {context_length}; the artifact "
            f"has {[graph.name for graph in self.kind(kind)]}"
        )

    def _usable_graphs(self, kind: GraphKind) -> Sequence[GraphSpec]:
        if self._only is None:
            return self.kind(kind)
        return self.kind(kind)[-1:] if kind == "scoring" else self._only
