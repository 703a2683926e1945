# SPDX-License-Identifier: Apache-2.0
"""Requests as rows of a step: what a graph takes for each, and which row of its outputs belongs to which.

The caller decides which requests a step advances. Each is known by its slot; the random numbers are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ..core import PromptPiece, StepOutput
from ..step.spec import CHUNK, DECODE, GraphSpec, SamplingParams
from .logprobs import TokenLogprobs
from .runner import GraphRunner
from .step_tensors import FROM_SLOT, DecodeRows


class UniformStream:
    """The random numbers of one request, one per token that it gets: neighbours and chunking change none of them."""

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._seed = seed
        self.rewind_to(0)

    def draw_number(self) -> float:
        """Return the next number in [0, 1), a float32."""
        return float(self._random.random(dtype=np.float32))

    def rewind_to(self, drawn: int) -> None:
        """Make the next number the one that follows the first `drawn`."""
        self._random = np.random.default_rng(self._seed)
        self._random.random(drawn, dtype=np.float32)


class RowRequest(Protocol):
    """A request as a step's rows need it: greedy where the host chooses; with its random numbers where the graphs draw."""

    slot: int
    sampling: SamplingParams
    uniforms: UniformStream | None

    @property
    def on_host(self) -> bool: ...

    @property
    def logprobs(self) -> bool: ...


R = TypeVar("R", bound=RowRequest)
# Each request that is due a token, with the token, or with logits `[vocab]` float32 for the host to choose from.
Chosen = list[tuple[R, int | np.ndarray]]


class _FilledStep(NamedTuple, Generic[R]):
    """A step, and the requests that are due a token of it with their rows: of decode rows and of pieces."""

    pieces: Sequence[PromptPiece]
    decode: DecodeRows | None
    due: list[tuple[R, int]]
    ended: list[tuple[R, int]]

    def list_requests(self) -> list[R]:
        return [request for request, _ in (*self.due, *self.ended)]


class StepRows(Generic[R]):
    """The rows of all slots, kept between steps.

    Attributes:
        logprobs: by slot, a row of `TokenLogprobs` for each token of the last run that a request wants them of.
        scored: after a run of a scoring graph, logits `[tokens, vocab]` of each piece, in memory that the next run may use again.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.scored: list[np.ndarray] = []
        self._requests: dict[int, R] = {}
        slots = runner.config.batch_size
        self._decode = DecodeRows(
            token_ids=np.zeros(slots, np.int32),
            active=np.zeros(slots, bool),
            sampling_params=np.zeros((slots, len(SamplingParams._fields)), np.float32),
            uniforms=np.zeros(slots, np.float32),
        )
        # The same memory without numpy: after a step its code has left the processor's caches.
        self._tokens, self._active = self._decode.token_ids.data, self._decode.active.data
        self._none = np.zeros(slots, bool).data

    def start_request(self, request: R, *, resets: bool = True) -> None:
        """Give a request's slot to it, emptied with `resets`."""
        if resets:
            self._runner.reset_slot(request.slot)
        self._requests[request.slot] = request
        self._decode.sampling_params[request.slot] = request.sampling
        self._decode.uniforms[request.slot] = 0.0

    def feed_token(self, slot: int, token_id: int) -> None:
        """Set the token that a slot's next decode row processes."""
        self._tokens[slot] = token_id

    def run_rows(
        self, decodes: Sequence[R], pieces: Sequence[PromptPiece], graph: GraphSpec | None = None
    ) -> Chosen[R]:
        """Run one graph once, with pieces of requests that were started in their slots.

        Return each request that is due a token, decodes first, with its token or logits; the next run may use their memory again.
        """
        filled = self._fill_step(decodes, pieces)
        scores = graph is not None and graph.scores_prompts
        output = self._runner.run_step(
            filled.pieces,
            filled.decode,
            graph,
            logits=scores or self._wants_logits(filled),
            outputs=scores or bool(filled.due or filled.ended),
        )
        self.scored = output.of_prompts(pieces) if scores else []
        self.logprobs = {}
        for group, rows in ((DECODE, filled.due), (CHUNK, filled.ended)):
            wanted = [(request.slot, row) for request, row in rows if request.logprobs and not request.on_host]
            if wanted:
                found = self._runner.find_logprobs(group, [row for _, row in wanted], output)
                for place, (slot, _) in enumerate(wanted):
                    self.logprobs[slot] = TokenLogprobs(*(each[place] for each in found))
        return self._read_chosen(filled, output)

    def may_run_ahead(self, decodes: Sequence[R], pieces: Sequence[PromptPiece]) -> bool:
        """Return whether the device runs ahead, and chooses for all that are due a token: then `start_rows` may be called."""
        due = (*decodes, *(self._requests[piece.slot] for piece in pieces if piece.is_last))
        return self._runner.runs_ahead and not any(request.on_host or request.logprobs for request in due)

    def start_rows(self, decodes: Sequence[R], pieces: Sequence[PromptPiece]) -> Callable[[], Chosen[R]]:
        """Start a run as `run_rows` does; return what waits for its end.

        The next decode rows of requests that are due a token take it from their slots; no caller feeds it to them.
        """
        filled = self._fill_step(decodes, pieces)
        wait = self._runner.start_step(filled.pieces, filled.decode, logits=False)
        self.logprobs = {}
        for request in filled.list_requests():
            self.feed_token(request.slot, FROM_SLOT)
        return lambda: self._read_chosen(filled, wait())

    def _fill_step(self, decodes: Sequence[R], pieces: Sequence[PromptPiece]) -> _FilledStep[R]:
        filled = list(pieces)
        for place, piece in enumerate(pieces):
            if piece.is_last:  # the n-th draw of a request is its n-th token's, however its prompt was cut
                owner = self._requests[piece.slot]
                uniform = 0.0 if owner.uniforms is None else owner.uniforms.draw_number()
                filled[place] = replace(piece, sampling=owner.sampling, uniform=uniform)
        self._active[:] = self._none
        for request in decodes:
            self._active[request.slot] = True
            if request.uniforms is not None:
                self._decode.uniforms[request.slot] = request.uniforms.draw_number()
        due = [(request, request.slot) for request in decodes]
        ended = [(self._requests[piece.slot], row) for row, piece in enumerate(pieces) if piece.is_last]
        return _FilledStep(filled, self._decode if decodes else None, due, ended)

    def _wants_logits(self, filled: _FilledStep[R]) -> bool:
        if not self._runner.executable.runs_ahead:
            return True  # they cost nothing there
        wanted = [request.logprobs for request, _ in filled.ended]
        if self._runner.config.returns_decode_logits:
            wanted += [request.logprobs for request, _ in filled.due]
        return any(wanted) or any(request.on_host for request in filled.list_requests())

    def _read_chosen(self, filled: _FilledStep[R], output: StepOutput) -> Chosen[R]:
        chosen: Chosen[R] = []
        for group, rows in ((DECODE, filled.due), (CHUNK, filled.ended)):
            if not rows:
                continue
            tokens, logits = output.of_group(group)
            on_device = None if tokens is None else tokens.tolist()
            for request, row in rows:
                source = logits if request.on_host else on_device
                assert source is not None
                chosen.append((request, source[row]))
        return chosen
