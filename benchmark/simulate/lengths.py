# SPDX-License-Identifier: Apache-2.0
"""Long-tailed lengths of requests: a published trace's, and a distribution's by its formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers, drawn apart from each other, and the sequence length that holds (almost) all of them.

    Attributes:
        prompts, answers: quantiles at evenly spaced probabilities from 0 to 1.
        source: where they come from.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    sequence_length: int
    source: str


def lognormal(median: float, sigma: float, least: int, most: int) -> tuple[int, ...]:
    """Quantiles of a lognormal distribution, cut at both ends, a 200th apart."""
    normal = NormalDist(math.log(median), sigma)
    inner = [round(math.exp(normal.inv_cdf(number / 200))) for number in range(1, 200)]
    return tuple(min(max(length, least), most) for length in (least, *inner, most))


LENGTHS = {
    # Every 20th part of the 19,366 requests of data/AzureLLMInferenceTrace_conv.csv, github.com/Azure/AzurePublicDataset
    # (CC BY), which Patel et al., Splitwise, ISCA 2024, describe. Logarithms of both lengths of a request correlate by 0.09.
    "azure-conversation": Lengths(
        (
            2,
            181,
            207,
            372,
            387,
            396,
            403,
            414,
            703,
            984,
            1020,
            1045,
            1071,
            1097,
            1130,
            1189,
            1315,
            1876,
            2734,
            4083,
            14050,
        ),
        (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000),
        16384,
        "conversations of the Azure LLM inference trace 2023",
    ),
    "lognormal": Lengths(
        lognormal(220, 1.1, 1, 3500),
        lognormal(220, 0.8, 2, 3500),
        4096,
        "medians of 220 tokens, sigma 1.1 of prompts and 0.8 of answers",
    ),
}
