# SPDX-License-Identifier: Apache-2.0
"""The counts of an engine: how full its steps are, what prefixes saved, how long requests waited."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import Step


@dataclass
class SecondsSummary:
    """Seconds of many requests, without a list of them."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add_seconds(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class GraphUse:
    """The runs of one graph; of the tokens that they had room for, those of requests, and the padding."""

    runs: int = 0
    tokens: int = 0
    padding: int = 0


@dataclass
class Statistics:
    """Counts since the engine was made, by what the graphs that ran computed.

    Attributes:
        decode_tokens, idle_decode_rows: decode rows that advanced a request, and those that ran along empty.
        prompt_tokens, padded_prompt_tokens: tokens of chunk rows that were computed, and their padding.
        prefix_hit_tokens: prompt tokens that were reused instead of computed.
        preemptions: how often a request gave its blocks back because there were too few.
        recomputed_tokens: of `prompt_tokens`, those that were computed before a preemption.
        blocks_in_use: of the cache, that requests have now; slots, where it has no blocks.
        queue_seconds, first_token_seconds: from a request's arrival to its first step, and to its first token (TTFT).
        step_tokens: how many steps computed so many tokens of requests, by that number.
    """

    steps: int = 0
    decode_tokens: int = 0
    idle_decode_rows: int = 0
    prompt_tokens: int = 0
    padded_prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    blocks_in_use: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    queue_seconds: SecondsSummary = field(default_factory=SecondsSummary)
    first_token_seconds: SecondsSummary = field(default_factory=SecondsSummary)
    graphs: dict[str, GraphUse] = field(default_factory=dict)
    step_tokens: dict[int, int] = field(default_factory=dict)

    def count_step(self, step: Step) -> None:
        """Add the rows of a step."""
        graph, tokens = step.graph, len(step.decodes)
        self.steps += 1
        self.preemptions += len(step.preempted)
        if graph.has_decode:
            self.decode_tokens += len(step.decodes)
            self.idle_decode_rows += graph.batch_size - len(step.decodes)
        if graph.has_chunk:
            real = sum(piece.count for piece in step.pieces)
            tokens += real
            self.prompt_tokens += real
            self.recomputed_tokens += sum(piece.recomputed for piece in step.pieces)
            self.padded_prompt_tokens += graph.prompt_capacity - real
            self.prefix_hit_tokens += sum(piece.prefix.length for piece in step.pieces if piece.prefix)
        use = self.graphs.setdefault(graph.name, GraphUse())
        self.step_tokens[tokens] = self.step_tokens.get(tokens, 0) + 1
        use.runs += 1
        use.tokens += tokens
        use.padding += graph.tokens - tokens
