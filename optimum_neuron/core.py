# SPDX-License-Identifier: Apache-2.0
"""The types that cross rooms: a request, a piece of its prompt, a step and what the step gives. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np

from .step.spec import DECODE, GREEDY, GraphSpec, SamplingParams


# An end token was chosen; all tokens asked for are there; the caller gave up.
FinishReason = Literal["stop", "length", "abort"]
_LARGEST_TOKEN = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to continue it. Two requests are equal only if they are the same object.

    Attributes:
        request_id: unique among the requests that are not finished.
        prompt_token_ids: int32 `[n]`, read-only; any sequence of whole numbers is accepted.
        max_new_tokens: most tokens to generate. None: as many as a row of the cache holds.
        eos_token_ids: tokens that end the generation; the one chosen is returned as the last token.
        sampling: how the on-device sampler chooses.
        seed: makes sampling repeatable.
        priority: lower goes first.
        atomic: a single step takes in the prompt, because its tokens see later ones of the same prompt.
        processors: logits processors that choose tokens on the host; None leaves the choice to the device.
        do_sample: with `processors`, whether the host draws tokens instead of taking the best one.
        logprobs: whether to return the log-probability of each chosen token, before sampling parameters.
        ends: takes the generated tokens and the seconds since the first step began; returns why the text ends there, or None.

    Raises:
        TypeError: the prompt, `eos_token_ids`, `max_new_tokens` or `priority` hold something other than whole numbers, or
            `sampling` is no SamplingParams of numbers.
        ValueError: the prompt is not one-dimensional, or a token is negative or beyond int32.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    max_new_tokens: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = GREEDY
    seed: int | None = None
    priority: int = 0
    atomic: bool = False
    processors: Any = None
    do_sample: bool = False
    logprobs: bool = False
    ends: Callable[[Sequence[int], float], FinishReason | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", _read_only_tokens(self.request_id, self.prompt_token_ids))
        eos = self.eos_token_ids
        if not isinstance(eos, Collection) or isinstance(eos, str):
            raise TypeError(f"eos_token_ids of request {self.request_id!r} is {eos!r}; give a set of token ids")
        object.__setattr__(self, "eos_token_ids", frozenset(eos))
        new_tokens = () if self.max_new_tokens is None else (self.max_new_tokens,)
        for name, values in (("eos_token_ids", eos), ("max_new_tokens", new_tokens), ("priority", (self.priority,))):
            check_whole_numbers(values, f"{name} of request {self.request_id!r}")
        if not isinstance(self.sampling, SamplingParams) or not all(isinstance(each, Real) for each in self.sampling):
            raise TypeError(
                f"request {self.request_id!r} has sampling={self.sampling!r}; give SamplingParams of numbers"
            )


def check_whole_numbers(values: Iterable[object], what: str) -> None:
    """Raise TypeError where one of the values is no whole number; a truth value is none."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{what} is {value!r}, a {type(value).__name__}; give a whole number")


def _read_only_tokens(request_id: str, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    given = np.asarray(token_ids)
    if given.ndim != 1:
        raise ValueError(
            f"the prompt of request {request_id!r} has shape {list(given.shape)}, not [tokens]; give one row of token ids"
        )
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"the prompt of request {request_id!r} holds {given.dtype} values; give whole numbers")
    if given.size and not 0 <= int(given.min()) <= int(given.max()) <= _LARGEST_TOKEN:
        raise ValueError(
            f"the prompt of request {request_id!r} holds token ids from {given.min()} to {given.max()}; "
            f"they must lie between 0 and {_LARGEST_TOKEN}"
        )
    tokens = given.astype(np.int32)
    tokens.setflags(write=False)
    return tokens


class Prefix(NamedTuple):
    """The first tokens of a prompt, which the cache holds already.

    Attributes:
        length: how many; they need not be computed.
        blocks: full blocks with them, which the request reads together with other requests.
        source: the block with the rest of them, copied or continued in place; None where there is no rest.
        ends: whether `source` has nothing else of use, so that it can be continued in place.
        state: the place of the state after them, where rows keep state next to keys and values.
        cut: the place where the prompt parts from tokens that were computed before, where kept state is worth a cut; 0: nowhere.
    """

    length: int = 0
    blocks: tuple[int, ...] = ()
    source: int | None = None
    ends: bool = False
    state: int | None = None
    cut: int = 0

    def shorten(self, length: int, block_length: int) -> Prefix:
        """Return the part with the first `length` tokens."""
        full, source, ends = length // block_length, self.source, self.ends
        if full < len(self.blocks):
            source, ends = self.blocks[full], False
        blocks = self.blocks[:full]
        rest = length - len(blocks) * block_length  # a whole block where `source` is full
        return self._replace(length=length, blocks=blocks, source=source if rest else None, ends=ends and rest > 0)


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Consecutive tokens that a step takes in for one request: of its prompt, or of all that it had when it was preempted.

    Attributes:
        slot: the request's row of the cache.
        token_ids: int32 `[count]`, at least one. A piece longer than a graph's rows takes several of them.
        sampling, uniform: how the on-device sampler chooses after the last token of a prompt.
        request_id, arrival: the request; `arrival` distinguishes it from a later one with the same id.
        start: place of the first token in the prompt.
        is_first: the request takes its slot with this piece; the slot's former contents are void beyond `prefix`.
        is_last: the prompt ends here, and the piece's token is the next generated one.
        prefix: what the cache holds of the prompt, up to `start`; only ever in a first piece.
        recomputed: tokens of the piece that the cache held before the request was preempted.
        cut: where the prompt's pieces have a cut, as in `Prefix`.
    """

    slot: int
    token_ids: np.ndarray = field(compare=False)
    sampling: SamplingParams = GREEDY
    uniform: float = 0.0
    request_id: str = ""
    arrival: int = 0
    start: int = 0
    is_first: bool = False
    is_last: bool = True
    prefix: Prefix | None = None
    recomputed: int = 0
    cut: int = 0

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def slice_tokens(self, offset: int, count: int) -> PromptPiece:
        """Return the piece of `count` tokens from `offset` on."""
        end = offset + count
        is_last = self.is_last and end == self.count
        return replace(self, token_ids=self.token_ids[offset:end], start=self.start + offset, is_last=is_last)


class RequestRow(NamedTuple):
    """A request and its row of the cache, -1 where it has none; `arrival` as in `PromptPiece`."""

    request_id: str
    slot: int
    arrival: int


class Assignment(NamedTuple):
    """Blocks for the tokens of a row from its block `first` on; `arrival` as in `PromptPiece`.

    The first `shared` of them contain tokens of the row already and are only read, by other rows too.
    """

    request_id: str
    slot: int
    first: int
    blocks: tuple[int, ...]
    shared: int
    arrival: int


class BlockCopy(NamedTuple):
    """A copy of the first `length` tokens of a block into another one."""

    source: int
    destination: int
    length: int


class KeptState(NamedTuple):
    """A copy of a row's state, of its first `length` tokens, to a place where it is kept; `arrival` as in `PromptPiece`."""

    request_id: str
    slot: int
    length: int
    place: int
    arrival: int


class Step(NamedTuple):
    """One graph run, and what happens before and after it.

    In this order: preempted requests leave their rows, blocks are assigned, copies made, states of prefixes restored, the
    graph runs, states are kept. A later copy may overwrite what an earlier one reads.

    Attributes:
        graph: runs the step. A piece with more tokens than `graph.chunk_size` takes several rows.
        decodes: requests that get one token each, in the order of their slots.
        pieces: of the prompts that the step advances.
        passed_over: the prompt that was due and got nothing, because shorter ones went before it.
        preempted: requests that give back their rows and blocks, and are computed again later.
    """

    graph: GraphSpec
    decodes: tuple[RequestRow, ...]
    pieces: tuple[PromptPiece, ...]
    passed_over: RequestRow | None = None
    preempted: tuple[RequestRow, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    kept: tuple[KeptState, ...] = ()


class StepOutput(NamedTuple):
    """Tokens that the on-device sampler chose, and logits, by row; None where the graph returns none or nothing reads them.

    Decode rows are slots. Chunk rows are in the order of the step's pieces and stand for the last token of each. `prompt_logits`
    `[rows, tokens, vocab]` come from a scoring graph. The next run of any graph may use the memory again: copy what you keep.
    """

    decode_tokens: np.ndarray | None = None
    decode_logits: np.ndarray | None = None
    chunk_tokens: np.ndarray | None = None
    chunk_logits: np.ndarray | None = None
    prompt_logits: np.ndarray | None = None

    def of_group(self, group: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the tokens and logits of DECODE or CHUNK rows."""
        decodes = self.decode_tokens, self.decode_logits
        return decodes if group == DECODE else (self.chunk_tokens, self.chunk_logits)

    def of_prompts(self, pieces: Sequence[PromptPiece]) -> list[np.ndarray]:
        """Return a scoring graph's logits of all tokens of each piece, `[tokens, vocab]`."""
        assert self.prompt_logits is not None
        row, found = 0, []
        for piece in pieces:
            rows = -(-piece.count // self.prompt_logits.shape[1])
            found.append(self.prompt_logits[row : row + rows].reshape(-1, self.prompt_logits.shape[-1])[: piece.count])
            row += rows
        return found
