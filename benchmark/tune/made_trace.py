# SPDX-License-Identifier: Apache-2.0
"""A trace that is made: requests at random times, of long-tailed lengths."""

from __future__ import annotations

from argparse import Namespace

import numpy as np

from optimum_neuron.tools.tune.trace import Trace, TracedRequest


# Of the logarithms of both lengths.
SIGMA = 0.7
LONGEST_PROMPT, LONGEST_ANSWER = 800, 200


def made_trace(args: Namespace) -> Trace:
    """As many requests as the options say, by their seed."""
    random = np.random.default_rng(args.seed)
    arrivals = np.cumsum(random.exponential(1 / args.rate, args.requests))
    prompts = np.rint(random.lognormal(np.log(args.prompt), SIGMA, args.requests)).clip(1, LONGEST_PROMPT)
    answers = np.rint(random.lognormal(np.log(args.new_tokens), SIGMA, args.requests)).clip(2, LONGEST_ANSWER)
    requests = [
        TracedRequest(float(arrival), int(prompt), int(new), source=f"request {number}")
        for number, (arrival, prompt, new) in enumerate(zip(arrivals, prompts, answers, strict=True))
    ]
    return Trace.of(requests, f"seed {args.seed}")
