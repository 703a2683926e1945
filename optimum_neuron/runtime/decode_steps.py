# SPDX-License-Identifier: Apache-2.0
"""The decode steps of one call of generate: one after the other, or each started before the last one is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core import StepOutput
from .runner import GraphRunner
from .step_tensors import FROM_SLOT, DecodeRows
from .token_choice import HostChoice, OnDeviceChoice


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
        """Return what follows the last tokens.

        Args:
            tokens: of each row.
            unfinished: whether a row has not ended with its own.
            more: whether another step may follow this one.
        """
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
