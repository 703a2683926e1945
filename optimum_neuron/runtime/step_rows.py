# SPDX-License-Identifier: Apache-2.0
"""Requests as rows of a step: what the graphs are told of each, and which row of their outputs is whose.

Which requests a step advances is decided elsewhere. Each is known by its slot; the random numbers are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from ..step.sampling.logprobs import Logprobs
from ..step.spec import CHUNK, DECODE, GraphSpec, SamplingParams
from .runner import GraphRunner
from .step_tensors import FROM_SLOT, Chunk, DecodeRows, StepOutput, TokenReader


class UniformStream:
    """The random numbers of one request, one per token that it gets: neighbours and chunking change none of them."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._seed = seed
        self.rewind(0)

    def draw(self) -> float:
        """The next number in [0, 1), as float32 has it."""
        return float(self._random.random(dtype=np.float32))

    def rewind(self, drawn: int) -> None:
        """Makes the next number the one that follows the first `drawn`."""
        self._random = np.random.default_rng(self._seed)
        self._random.random(drawn, dtype=np.float32)


class RowRequest(Protocol):
    """What a step's rows need to know of a request.

    Attributes:
        slot: its row of the cache.
        sampling: what the graphs are told; greedy where the host chooses.
        uniforms: its random numbers, where the graphs draw with them.
        on_host: whether the host chooses its tokens, from logits.
        logprobs: whether the graphs tell the log-probabilities of tokens that they choose.
    """

    slot: int
    sampling: SamplingParams
    uniforms: UniformStream | None

    @property
    def on_host(self) -> bool: ...

    @property
    def logprobs(self) -> bool: ...


class Prefix(NamedTuple):
    """The first `length` tokens of a slot, and the snapshot of the state behind them, where slots keep state."""

    slot: int
    length: int
    snapshot: int | None = None


R = TypeVar("R", bound=RowRequest)


@dataclass
class PromptPart(Generic[R]):
    """The next tokens of a request's prompt; `ends` where they are its last, so that a token follows them."""

    request: R
    token_ids: np.ndarray
    ends: bool


class _Filled(NamedTuple, Generic[R]):
    """A step, and who is due a token of it: a request and its row, of decode rows and of chunks."""

    chunks: list[Chunk]
    decode: DecodeRows | None
    due: list[tuple[R, int]]
    ended: list[tuple[R, int]]


class StepRows(Generic[R]):
    """The rows of all slots, kept between steps.

    Args:
        runner: the graphs and slots.

    Attributes:
        told: by slot, what the graphs told of the last run's tokens, where somebody wants it: a row of `Logprobs` each.
        scored: of a run of a graph that scores, logits `[tokens, vocab]` of each of its parts, in memory that the next run may use again.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self.told: dict[int, Logprobs] = {}
        self.scored: list[Tensor] = []
        slots = runner.config.batch_size
        self._decode = DecodeRows(
            token_ids=np.zeros(slots, np.int32),
            active=np.zeros(slots, bool),
            sampling_params=np.zeros((slots, len(SamplingParams._fields)), np.float32),
            uniforms=np.zeros(slots, np.float32),
        )
        # The same memory without numpy, whose code has left the processor's caches behind a step.
        self._tokens, self._active = self._decode.token_ids.data, self._decode.active.data
        self._none = np.zeros(slots, bool).data
        self._readers = {DECODE: TokenReader(), CHUNK: TokenReader()}

    def start(self, request: R, source: Prefix | None) -> None:
        """Makes a request's slot its own.

        Args:
            source: what the request takes over; None: it starts from nothing.
        """
        if source is None:
            self._runner.reset(request.slot)
        else:
            self._runner.reuse(request.slot, *source)
        self._decode.sampling_params[request.slot] = request.sampling
        self._decode.uniforms[request.slot] = 0.0

    def feed(self, slot: int, token_id: int) -> None:
        """Sets the token that a slot's next decode row processes."""
        self._tokens[slot] = token_id

    def run(
        self, decodes: Sequence[R], parts: Sequence[PromptPart[R]], graph: GraphSpec | None = None
    ) -> list[tuple[R, int | Tensor]]:
        """One run of one graph.

        Args:
            graph: as in `GraphRunner.step`.

        Returns:
            Each request that is due a token, decodes first: with the token that the graph chose, or for the host to choose
            from with logits `[vocab]` float32, in memory that the next run may use again.
        """
        chunks, rows, due, ended = self._fill(decodes, parts)
        scores = graph is not None and graph.scores_prompts
        wants_logits = scores or self._wants_logits(due, ended)
        output = self._runner.step(chunks, rows, graph, logits=wants_logits, outputs=scores or bool(due or ended))
        self.scored = output.of_prompts(chunks) if scores else []
        self.told = self._tell(DECODE, due, output) | self._tell(CHUNK, ended, output)
        return self._chosen(due, ended, output)

    def may_run_ahead(self, decodes: Sequence[R], parts: Sequence[PromptPart[R]]) -> bool:
        """Whether `run_ahead` may be called: the device runs ahead, and chooses for all who are due a token, who want nothing else."""
        due = (*decodes, *(part.request for part in parts if part.ends))
        return self._runner.runs_ahead and not any(request.on_host or request.logprobs for request in due)

    def run_ahead(
        self, decodes: Sequence[R], parts: Sequence[PromptPart[R]]
    ) -> Callable[[], list[tuple[R, int | Tensor]]]:
        """As `run`, and returns before the step has ended: what is returned waits for that.

        The next decode rows of those who are due a token take it from their slots; nobody feeds it to them.
        """
        chunks, rows, due, ended = self._fill(decodes, parts)
        wait = self._runner.start(chunks, rows, logits=False)
        self.told = {}
        for request, _ in (*due, *ended):
            self.feed(request.slot, FROM_SLOT)

        def chosen() -> list[tuple[R, int | Tensor]]:
            return self._chosen(due, ended, wait())

        return chosen

    def _fill(self, decodes: Sequence[R], parts: Sequence[PromptPart[R]]) -> _Filled[R]:
        rows = self._decode
        # Drawn only where a token is: the n-th draw of a request is its n-th token's, however its prompt was cut.
        chunks = [
            Chunk(part.request.slot, part.token_ids, part.request.sampling, _draw(part.request))
            if part.ends
            else Chunk(part.request.slot, part.token_ids)
            for part in parts
        ]
        self._active[:] = self._none
        for request in decodes:
            self._active[request.slot] = True
            if request.uniforms is not None:
                rows.uniforms[request.slot] = request.uniforms.draw()
        due = [(request, request.slot) for request in decodes]
        ended = [(part.request, row) for row, part in enumerate(parts) if part.ends]
        return _Filled(chunks, rows if decodes else None, due, ended)

    def _wants_logits(self, due: Sequence[tuple[R, int]], ended: Sequence[tuple[R, int]]) -> bool:
        if not self._runner.executable.runs_ahead:
            return True  # they cost nothing there
        told = [request.logprobs for request, _ in ended]
        if self._runner.config.returns_decode_logits:
            told += [request.logprobs for request, _ in due]
        return any(told) or any(request.on_host for request, _ in (*due, *ended))

    def _tell(self, group: str, rows: Sequence[tuple[R, int]], output: StepOutput) -> dict[int, Logprobs]:
        if not rows:
            return {}
        wanted = [(request.slot, row) for request, row in rows if request.logprobs and not request.on_host]
        if not wanted:
            return {}
        found = self._runner.logprobs(group, [row for _, row in wanted], output)
        return {slot: Logprobs(*(each[place] for each in found)) for place, (slot, _) in enumerate(wanted)}

    def _chosen(
        self, due: Sequence[tuple[R, int]], ended: Sequence[tuple[R, int]], output: StepOutput
    ) -> list[tuple[R, int | Tensor]]:
        chosen: list[tuple[R, int | Tensor]] = []
        for group, rows in ((DECODE, due), (CHUNK, ended)):
            if not rows:
                continue
            tokens, logits = output.of(group)
            on_device = None if tokens is None else self._readers[group].read(tokens)
            for request, row in rows:
                if request.on_host:
                    assert logits is not None
                    chosen.append((request, logits[row]))
                else:
                    assert on_device is not None
                    chosen.append((request, on_device[row]))
        return chosen


def _draw(request: RowRequest) -> float:
    return 0.0 if request.uniforms is None else request.uniforms.draw()
