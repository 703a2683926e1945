# SPDX-License-Identifier: Apache-2.0
"""The generation loop: prompts in chunks, then one token per row and step. Knows no files and no model class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from .decode_steps import DecodeSteps
from .limits import cache_tokens
from .prefill import prefill
from .runner import GraphRunner
from .step_tensors import TokenReader
from .stopping import Stopping
from .token_choice import HostChoice, OnDeviceChoice


# They look at tokens and the time alone: a step later they say the same. What others look at is not known.
_MAY_WAIT = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


@dataclass
class GenerationLoop:
    """Generates for up to batch_size prompts; row i of the batch uses slot i.

    Where the device chooses the tokens and feeds them to its next step, that is started before they are read: stopping criteria
    and streamer get them while it runs. What is returned is the same.

    Attributes:
        pad_token_id: what finished rows get while others go on; None lets them go on too, as transformers does where no
            end token was asked for.
    """

    runner: GraphRunner
    choice: OnDeviceChoice | HostChoice
    stopping_criteria: StoppingCriteriaList
    pad_token_id: int | None
    streamer: BaseStreamer | None = None
    _reader: TokenReader = field(default_factory=TokenReader)

    def run(self, input_ids: Tensor, prompts: Sequence[np.ndarray], max_length: int) -> Tensor:
        """Returns `[rows, length]`: the prompts as they came, padding included, with the generated tokens behind.

        Args:
            input_ids: `[rows, prompt_length]`.
            prompts: the real tokens of each row.
            max_length: columns of the longest result.
        """
        rows, column = input_ids.shape
        sequences = torch.empty((rows, max_length), dtype=torch.int64)
        sequences[:, :column] = input_ids
        cells = sequences.numpy().data  # are set without torch and numpy: see Stopping
        unfinished = [True] * rows
        stopping, steps = Stopping(self.stopping_criteria), self._steps(rows)
        self.runner.reserve(cache_tokens(prompts, max_length - column))
        try:
            draws = self.choice.uniforms(rows) if isinstance(self.choice, OnDeviceChoice) else None
            on_host = isinstance(self.choice, HostChoice)
            first = prefill(self.runner, prompts, self.choice.sampling, draws, logits=on_host)
            tokens = self._tokens(sequences, rows, column, *first)
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
                ended = stopping.ended(sequences, column, tokens, self._scores())
                unfinished = [going and not end for going, end in zip(unfinished, ended, strict=True)]
                if column == max_length or not any(unfinished):
                    break
                output = steps.next(tokens, unfinished, more=column + 1 < max_length)
                tokens = self._tokens(sequences, rows, column, output.decode_tokens, output.decode_logits)
        finally:
            steps.end()
            self.runner.reset_all()
        if self.streamer is not None:
            self.streamer.end()
        return sequences[:, :column].contiguous()

    def _steps(self, rows: int) -> DecodeSteps:
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

    def _tokens(
        self, sequences: Tensor, rows: int, column: int, tokens: Tensor | None, logits: Tensor | None
    ) -> list[int]:
        if isinstance(self.choice, HostChoice):
            assert logits is not None
            chosen: list[int] = self.choice.choose(sequences[:, :column], logits[:rows]).tolist()
            return chosen
        assert tokens is not None
        return self._reader.read(tokens)[:rows]

    def _scores(self) -> tuple[Tensor, ...] | None:
        scores = self.choice.scores if isinstance(self.choice, HostChoice) else None
        return None if scores is None else tuple(scores)
