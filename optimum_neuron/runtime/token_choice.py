# SPDX-License-Identifier: Apache-2.0
"""The choice of the next token: by the on-device sampler, or by transformers' logits processors on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..arrays import to_torch
from ..config import NeuronConfig
from ..step.spec import GREEDY, SamplingParams


# The warpers that the on-device sampler implements, in the order in which it applies them, and what each calls its strength. Its own
# parameter has the same name.
_ON_DEVICE: dict[type[LogitsProcessor], str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass
class OnDeviceChoice:
    """The graphs choose; the host gives one uniform random number per row and step."""

    sampling: SamplingParams

    def uniforms(self, rows: int) -> np.ndarray:
        """`[rows]` float32 in [0, 1), from torch's global generator, so that `torch.manual_seed` seeds it."""
        if self.sampling.temperature == 0.0:
            return np.zeros(rows, dtype=np.float32)
        return torch.rand(rows).numpy()


@dataclass
class HostChoice:
    """transformers' processors choose, from logits; with the same seed the tokens are those of transformers.

    Attributes:
        scores, logits: what `output_scores` and `output_logits` asked to keep, one `[rows, vocab]` a step.
        generator: draws the tokens; None is torch's global one.
    """

    processors: LogitsProcessorList
    do_sample: bool
    scores: list[Tensor] | None = None
    logits: list[Tensor] | None = None
    sampling: SamplingParams = GREEDY
    generator: torch.Generator | None = None

    @property
    def keeps(self) -> bool:
        return self.scores is not None or self.logits is not None

    def choose_tokens(self, input_ids: Tensor, rows: np.ndarray) -> list[int]:
        """Choose a token for each of `rows [rows, vocab]` float32, logits, after `input_ids [rows, length]`.

        Raises ValueError if the processors returned other than a score per token.
        """
        logits = to_torch(rows)
        if self.keeps or self.processors:  # processors may keep them, too, and the next run uses their memory again
            logits = logits.clone()
        scores = self.processors(input_ids, logits)
        if not isinstance(scores, Tensor) or scores.shape != logits.shape:
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"the logits processors returned {found}, not scores of the shape {list(logits.shape)}")
        if self.logits is not None:
            self.logits.append(logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.do_sample:
            best = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1, generator=self.generator)[:, 0]
        else:
            best = scores.argmax(-1)
        chosen: list[int] = best.tolist()
        return chosen


def choose_how(
    processors: LogitsProcessorList, config: NeuronConfig, *, do_sample: bool, keep_scores: bool, keep_logits: bool
) -> OnDeviceChoice | HostChoice:
    """Choose on the device where its sampler honours everything that was asked; otherwise on the host.

    Raises ValueError if the host would have to choose, and the graphs return no logits.
    """
    if keep_scores or keep_logits:
        obstacle: str | None = f"{'output_scores' if keep_scores else 'output_logits'}=True needs logits on the host"
    elif not config.on_device_sampling:
        obstacle = "the artifact was exported without on-device sampling"
    else:
        obstacle = find_host_reason(processors, do_sample)
    if obstacle is None:
        if not do_sample:
            return OnDeviceChoice(GREEDY)
        asked = {name: getattr(each, name) for each in processors for name in [_ON_DEVICE[type(each)]]}
        return OnDeviceChoice(SamplingParams(temperature=1.0)._replace(**asked).in_float32())
    if not config.returns_decode_logits:
        raise ValueError(
            f"{obstacle}, and this artifact returns no logits; export it with --output-logits (output_logits=True)"
        )
    return HostChoice(processors, do_sample, [] if keep_scores else None, [] if keep_logits else None)


def find_host_reason(processors: LogitsProcessorList, do_sample: bool) -> str | None:
    """Return why only the host can apply these processors, or None where the graphs do what they do."""
    kinds = [type(processor) for processor in processors]
    if kinds != [kind for kind in _ON_DEVICE if kind in kinds] or (kinds and not do_sample):
        foreign = next((kind for kind in kinds if kind not in _ON_DEVICE), None)
        what = foreign.__name__ if foreign else f"the order {', '.join(kind.__name__ for kind in kinds)}"
        return f"{what} is applied to logits on the host"
    for processor in processors:
        plain = type(processor)(getattr(processor, _ON_DEVICE[type(processor)]))
        if vars(processor) != vars(plain):
            options = ", ".join(f"{name}={value}" for name, value in vars(processor).items())
            return f"{type(processor).__name__} with {options} is applied to logits on the host"
    return None
