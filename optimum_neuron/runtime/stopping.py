# SPDX-License-Identifier: Apache-2.0
"""Which rows of a call of generate have ended, asked once per token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Stopping:
    """transformers' criteria, of which those that nearly all calls have are computed without torch.

    Behind a step that has read all weights, an operator of torch takes some 50 us to begin: its code has left the processor's caches.
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

    def ended(
        self, sequences: Tensor, length: int, tokens: Sequence[int], scores: tuple[Tensor, ...] | None
    ) -> list[bool]:
        """By row, whether it ends with its last token.

        Args:
            sequences: `[rows, most]`, of which `length` columns are set.
            tokens: the last of them, by row.
            scores: of all steps, each `[rows, vocab]`, where they are kept.
        """
        full = any(length >= most for most in self._lengths)
        ended = [full or token in self._ends for token in tokens]
        if not self._others:
            return ended
        others = self._others(sequences[:, :length], scores).tolist()
        return [own or other for own, other in zip(ended, others, strict=True)]
