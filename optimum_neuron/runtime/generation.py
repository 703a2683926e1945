# SPDX-License-Identifier: Apache-2.0
"""The generation loop: prompts in chunks, then one token per row and step. Knows no files and no model class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .prefill import prefill
from .runner import GraphRunner
from .token_choice import HostChoice, OnDeviceChoice


@dataclass
class GenerationLoop:
    """Generates for up to batch_size prompts; row i of the batch uses slot i.

    Attributes:
        pad_token_id: what finished rows get while others go on; None lets them go on too, as transformers does where no
            end token was asked for.
    """

    runner: GraphRunner
    choice: OnDeviceChoice | HostChoice
    stopping_criteria: StoppingCriteriaList
    pad_token_id: int | None
    streamer: BaseStreamer | None = None

    def run(self, input_ids: Tensor, prompts: Sequence[np.ndarray], max_length: int) -> Tensor:
        """Returns `[rows, length]`: the prompts as they came, padding included, with the generated tokens behind.

        Args:
            input_ids: `[rows, prompt_length]`.
            prompts: the real tokens of each row.
            max_length: columns of the longest result.
        """
        rows, column = input_ids.shape
        sequences = input_ids.new_empty((rows, max_length), dtype=torch.int64)
        sequences[:, :column] = input_ids
        slots = self.runner.config.batch_size
        sampling = np.tile(np.asarray(self.choice.sampling, dtype=np.float32), (slots, 1))
        uniforms = np.zeros(slots, dtype=np.float32)
        token_ids, active = np.zeros(slots, dtype=np.int32), np.zeros(slots, dtype=bool)
        unfinished = torch.ones(rows, dtype=torch.bool)
        kept = isinstance(self.choice, HostChoice) and self.choice.keeps  # of all rows, so all of them are computed
        self.runner.reset_all()
        try:
            draws = self.choice.uniforms(rows) if isinstance(self.choice, OnDeviceChoice) else None
            first = prefill(self.runner, prompts, self.choice.sampling, draws)
            tokens = self._tokens(sequences[:, :column], *first)
            while True:
                if self.pad_token_id is not None:
                    tokens = torch.where(unfinished, tokens, self.pad_token_id)
                sequences[:, column] = tokens
                column += 1
                if self.streamer is not None:
                    self.streamer.put(tokens)
                unfinished &= ~self.stopping_criteria(sequences[:, :column], self._scores())
                if column == max_length or not unfinished.any():
                    break
                token_ids[:rows] = tokens.numpy()
                active[:rows] = True if kept or self.pad_token_id is None else unfinished.numpy()
                if isinstance(self.choice, OnDeviceChoice):
                    uniforms[:rows] = self.choice.uniforms(rows)
                output = self.runner.decode(token_ids, active, sampling, uniforms)
                tokens = self._tokens(sequences[:, :column], output.decode_tokens, output.decode_logits)
        finally:
            self.runner.reset_all()
        if self.streamer is not None:
            self.streamer.end()
        return sequences[:, :column].contiguous()

    def _tokens(self, input_ids: Tensor, tokens: Tensor | None, logits: Tensor | None) -> Tensor:
        rows = input_ids.shape[0]
        if isinstance(self.choice, HostChoice):
            assert logits is not None
            return self.choice.choose(input_ids, logits[:rows])
        assert tokens is not None
        return tokens[:rows].to(input_ids.dtype)

    def _scores(self) -> tuple[Tensor, ...] | None:
        scores = self.choice.scores if isinstance(self.choice, HostChoice) else None
        return None if scores is None else tuple(scores)
