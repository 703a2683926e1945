# SPDX-License-Identifier: Apache-2.0
"""What is counted of logits beside those of a reference: perplexity, KL divergence, agreement of the most likely token."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


# Tokens whose probabilities are in float64 at a time.
_AT_ONCE = 64


@dataclass(frozen=True)
class Figures:
    """Of all tokens that follow another in the texts.

    Attributes:
        perplexity: exp of the mean negative log-probability of the text's own tokens.
        reference_perplexity: the same of the reference.
        kl_mean, kl_p99, kl_max: KL divergence of the distribution from the reference's, KL(reference || this), in nats per token.
        top1: share of tokens for which both have the same most likely one.
        tokens: how many.
    """

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    tokens: int

    def to_card(self) -> dict[str, Any]:
        """As JSON: what an artifact's card may say of it, beside of which text and which reference."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }


class Counts:
    """Collects text by text."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._reference_losses: list[Tensor] = []
        self._divergences: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, ids: Tensor, logits: Tensor, reference: Tensor) -> None:
        """Counts one text.

        Args:
            ids: `[tokens]` int64.
            logits, reference: `[tokens, vocab]`, of which those of the last token are of no use.

        Raises:
            ValueError: logits of another shape, or that are not finite.
        """
        if logits.shape != reference.shape or len(logits) != len(ids):
            raise ValueError(
                f"logits {list(logits.shape)} and the reference's {list(reference.shape)} are not of the same {len(ids)} tokens"
            )
        for start in range(0, len(ids) - 1, _AT_ONCE):
            stop = min(start + _AT_ONCE, len(ids) - 1)
            own, other = (each[start:stop].double() for each in (logits, reference))
            if not (own.isfinite().all() and other.isfinite().all()):
                raise ValueError(f"logits of tokens {start} to {stop - 1} are not finite; no figure follows from them")
            one, two = own.log_softmax(-1), other.log_softmax(-1)
            following = ids[start + 1 : stop + 1, None]
            self._losses.append(-one.gather(-1, following)[:, 0])
            self._reference_losses.append(-two.gather(-1, following)[:, 0])
            self._divergences.append((two.exp() * (two - one)).sum(-1).clamp(min=0))  # below 0 is rounding
            self._same.append(own.argmax(-1) == other.argmax(-1))

    def figures(self) -> Figures:
        """Of all that was added; raises ValueError where that is nothing."""
        if not self._losses:
            raise ValueError("there is no text of two tokens or more to count; give longer ones")
        divergences = torch.cat(self._divergences)
        return Figures(
            perplexity=math.exp(float(torch.cat(self._losses).mean())),
            reference_perplexity=math.exp(float(torch.cat(self._reference_losses).mean())),
            kl_mean=float(divergences.mean()),
            kl_p99=float(divergences.quantile(0.99)),
            kl_max=float(divergences.max()),
            top1=float(torch.cat(self._same).double().mean()),
            tokens=len(divergences),
        )
