# SPDX-License-Identifier: Apache-2.0
"""The generation loop: prompts in chunks, then one token per row and step. Knows no files and no model class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from ..core import StepOutput
from .lengths import count_cached
from .prefill import prefill_prompts
from .runner import GraphRunner
from .step_tensors import FROM_SLOT, DecodeRows
from .token_choice import HostChoice, OnDeviceChoice


class Stopping:
    """transformers' criteria; those that nearly all calls have are computed without torch.

    After a step that has read all weights, an operator of torch takes some 50 us to begin: its code has left the processor's caches.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self._ends: frozenset[int] = frozenset()
        self._lengths: list[int] = []
        self._others = StoppingCriteriaList()
        for each in criteria:
            if type(each) is EosTokenCriteria:
                self._ends |= set(each.eos_token_id.tolist())
            elif type(each) is MaxLengthCriteria:
                self._lengths.append(each.max_length)
            else:
                self._others.append(each)

    def find_ended(
        self, sequences: Tensor, length: int, tokens: Sequence[int], scores: tuple[Tensor, ...] | None
    ) -> list[bool]:
        """Return for each row whether it ends with its last token.

        `sequences` `[rows, most]` are set up to `length`, and end with `tokens`. Each of `scores` is `[rows, vocab]`, of a step.
        """
        full = any(length >= most for most in self._lengths)
        ended = [full or token in self._ends for token in tokens]
        if not self._others:
            return ended
        others = self._others(sequences[:, :length], scores).tolist()
        return [own or other for own, other in zip(ended, others, strict=True)]


class DecodeSteps:
    """Decode steps in which row i of the batch is slot i.

    Args:
        ahead: start each step while the last one runs. Its rows then take the tokens that their slots chose. A row that ends with
            a token that is not read yet decodes once more: nothing reads that, and it uses up no random number.
        all_rows: whether rows that have ended continue.
    """

    def __init__(
        self, runner: GraphRunner, choice: OnDeviceChoice | HostChoice, rows: int, *, ahead: bool, all_rows: bool
    ) -> None:
        self._runner, self._choice, self._count = runner, choice, rows
        self._ahead, self._all_rows = ahead, all_rows
        self._logits = isinstance(choice, HostChoice)
        slots = runner.config.batch_size
        sampling = np.tile(np.asarray(choice.sampling, dtype=np.float32), (slots, 1))
        uniforms = np.zeros(slots, dtype=np.float32)
        self._rows = DecodeRows(np.zeros(slots, dtype=np.int32), np.zeros(slots, dtype=bool), sampling, uniforms)
        # The same memory without numpy: after a step its code has left the processor's caches.
        self._tokens, self._active = self._rows.token_ids.data, self._rows.active.data
        self._started: Callable[[], StepOutput] | None = None
        self._random: Tensor | None = None

    def run_next(self, tokens: Sequence[int], unfinished: Sequence[bool], *, more: bool) -> StepOutput:
        """Return what follows the last token of each row; with `more`, another step may follow this one."""
        if not self._ahead:
            self._fill_rows(tokens, unfinished)
            return self._runner.run_step((), self._rows, logits=self._logits)
        step, self._started = self._started, None
        if step is None:
            self._fill_rows(tokens, unfinished)
            step = self._runner.start_step((), self._rows, logits=False)
        if more:
            self._random = torch.get_rng_state() if self._choice.sampling.temperature else None
            self._fill_rows([FROM_SLOT] * self._count, unfinished)
            self._started = self._runner.start_step((), self._rows, logits=False)
        return step()

    def drop_started(self) -> None:
        """Drop the step that was started for nothing, if there is one; the next one draws its random numbers."""
        if self._started is not None and self._random is not None:
            torch.set_rng_state(self._random)
        self._started = None

    def _fill_rows(self, tokens: Sequence[int], unfinished: Sequence[bool]) -> None:
        for row, token in enumerate(tokens):
            self._tokens[row] = token
            self._active[row] = self._all_rows or unfinished[row]
        if isinstance(self._choice, OnDeviceChoice) and self._choice.sampling.temperature:
            self._rows.uniforms[: self._count] = self._choice.uniforms(self._count)


# They look at tokens and the time alone: a step later they decide the same. What others look at is not known.
_MAY_WAIT = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


@dataclass
class GenerationLoop:
    """Generates for up to batch_size prompts; row i of the batch uses slot i.

    Where the device chooses the tokens and feeds them to its next step, that step starts before they are read: stopping criteria
    and streamer get them while it runs. The result is the same.

    Attributes:
        pad_token_id: what finished rows get while others continue; None lets them continue too, as transformers does where no
            end token was asked for.
    """

    runner: GraphRunner
    choice: OnDeviceChoice | HostChoice
    stopping_criteria: StoppingCriteriaList
    pad_token_id: int | None
    streamer: BaseStreamer | None = None

    def generate_tokens(self, input_ids: Tensor, prompts: Sequence[np.ndarray], max_length: int) -> Tensor:
        """Return `[rows, length]`: `input_ids` as given, padding included, then the generated tokens, up to `max_length` columns.

        `prompts` are the real tokens of each row.
        """
        rows, column = input_ids.shape
        sequences = torch.empty((rows, max_length), dtype=torch.int64)
        sequences[:, :column] = input_ids
        cells = sequences.numpy().data  # are set without torch and numpy: see Stopping
        unfinished = [True] * rows
        stopping, steps = Stopping(self.stopping_criteria), self._make_steps(rows)
        self.runner.reserve_slots(count_cached(prompts, max_length - column))
        try:
            draws = self.choice.uniforms(rows) if isinstance(self.choice, OnDeviceChoice) else None
            on_host = isinstance(self.choice, HostChoice)
            first = prefill_prompts(self.runner, prompts, self.choice.sampling, draws, logits=on_host)
            tokens = self._choose_tokens(sequences, rows, column, *first)
            while True:
                if self.pad_token_id is not None:
                    tokens = [
                        token if going else self.pad_token_id for token, going in zip(tokens, unfinished, strict=True)
                    ]
                for row, token in enumerate(tokens):
                    cells[row, column] = token
                column += 1
                if self.streamer is not None:
                    self.streamer.put(torch.tensor(tokens))
                kept = self.choice.scores if isinstance(self.choice, HostChoice) else None
                ended = stopping.find_ended(sequences, column, tokens, None if kept is None else tuple(kept))
                unfinished = [going and not end for going, end in zip(unfinished, ended, strict=True)]
                if column == max_length or not any(unfinished):
                    break
                output = steps.run_next(tokens, unfinished, more=column + 1 < max_length)
                tokens = self._choose_tokens(sequences, rows, column, output.decode_tokens, output.decode_logits)
        finally:
            steps.drop_started()
            self.runner.reset_slots()
        if self.streamer is not None:
            self.streamer.end()
        return sequences[:, :column].contiguous()

    def _make_steps(self, rows: int) -> DecodeSteps:
        on_device = isinstance(self.choice, OnDeviceChoice)
        may_wait = all(type(each) in _MAY_WAIT for each in self.stopping_criteria)
        kept = isinstance(self.choice, HostChoice) and self.choice.keeps  # of all rows, so all of them are computed
        return DecodeSteps(
            self.runner,
            self.choice,
            rows,
            ahead=self.runner.runs_ahead and on_device and may_wait,
            all_rows=kept or self.pad_token_id is None,
        )

    def _choose_tokens(
        self, sequences: Tensor, rows: int, column: int, tokens: np.ndarray | None, logits: np.ndarray | None
    ) -> list[int]:
        if isinstance(self.choice, HostChoice):
            assert logits is not None
            return self.choice.choose_tokens(sequences[:, :column], logits[:rows])
        assert tokens is not None
        chosen: list[int] = tokens[:rows].tolist()
        return chosen
