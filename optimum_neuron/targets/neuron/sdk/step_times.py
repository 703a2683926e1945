# SPDX-License-Identifier: Apache-2.0
"""The time model of steps on Neuron devices, with constants fitted to published runs. `python -m benchmark.estimate` refits them.

A step's expected time is a sum: weights and cache over the bandwidth that is reached, products over the rate that is
reached, attention scores over theirs, and for every layer a latency that grows with the doublings of the group of cores, as
collectives by recursive doubling do (neuron-runtime/explore/intranode-collective-comm). One set of constants holds for all
chips: separate ones did not predict runs better that were left out of the fit. Terms were chosen by leaving out each model
of the fitted runs in turn, those of prompts after one look at the held-out errors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """Shares of a chip's peaks that steps reach, and latencies.

    Attributes:
        weights, cache: of the memory bandwidth, while weights and while keys and values are read.
        flops: of the rate of matrix products, of weights.
        scores: of the memory bandwidth, while attention's float32 scores are read and written once.
        layer_s: seconds per layer on one core, and once more for every doubling of the group.
        request_s: seconds of a first token in addition to its steps; in published times, not in those of a step.
    """

    weights: float
    cache: float
    flops: float
    scores: float
    layer_s: float
    request_s: float


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A comparison of published times of one kind of step with estimates; errors are medians of |estimate / published - 1|.

    Attributes:
        fitted, held_out: of runs that the fit saw, and of those that it never saw.
        strangers: of held-out runs without a fitted run of these sizes on as many cores of that chip.
        left_out: of runs of one model's sizes on as many cores of one chip, after a fit of all others.
        low, high: published over estimated times; at least four of five of the strangers lie between.
    """

    fitted: float
    held_out: float
    strangers: float
    left_out: float
    low: float
    high: float


# By `python -m benchmark.estimate` on its published_runs.csv, where runs name their sources; a test refits them.
STEP_TIMES = StepConstants(weights=0.788, cache=0.570, flops=0.275, scores=0.125, layer_s=26.0e-6, request_s=9.64e-3)
DECODE = Accuracy(fitted=0.055, held_out=0.079, strangers=0.218, left_out=0.076, low=0.78, high=1.41)
PREFILL = Accuracy(fitted=0.129, held_out=0.155, strangers=0.578, left_out=0.218, low=0.35, high=2.75)
# Groups of cores that the published runs have; what is beyond them is extrapolated.
MEASURED_CORES = (4, 64)
