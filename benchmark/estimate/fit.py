# SPDX-License-Identifier: Apache-2.0
"""Constants of step times by published ones, and how far estimates are off. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from optimum_neuron.targets.neuron.sdk.step_times import STEP_TIMES, Accuracy, StepConstants

from .published import Measurement, coefficients, times_of


# Beyond this an error counts by its size, not by its square: some pages' times of like prompts differ by three.
_OUTLIER = 0.2
_ROUNDS = 200
# Share of the strangers' ratios that may lie on either side of the range that estimates tell.
_TAIL = 0.1


def fit(data: Sequence[Measurement]) -> StepConstants:
    """The constants whose sums are nearest to the published times, by the logarithm of their ratio (Huber's loss).

    Gauss-Newton over the constants' logarithms, so that none is negative.
    """
    work = np.array([one.work for one in data])
    published = np.array([one.milliseconds for one in data]) / 1e3
    share = np.array([one.share for one in data])
    logs = np.log(coefficients(STEP_TIMES))
    for _ in range(_ROUNDS):
        parts = work * np.exp(logs)
        total = parts.sum(1)
        residual = np.log(total / published)
        weight = share * np.minimum(1, _OUTLIER / np.maximum(abs(residual), 1e-9))
        slope = parts / total[:, None]
        curvature = slope.T @ (slope * weight[:, None])
        damping = 1e-3 * np.diag(np.diag(curvature) + 1e-9)
        change = np.linalg.solve(curvature + damping, -slope.T @ (weight * residual))
        logs += np.clip(change, -0.3, 0.3)
    return times_of(np.exp(logs))


def estimated_ms(one: Measurement, times: StepConstants) -> float:
    """Milliseconds that are estimated of a published time."""
    return float(one.work @ coefficients(times)) * 1e3


def error(one: Measurement, times: StepConstants) -> float:
    """estimate / published - 1."""
    return estimated_ms(one, times) / one.milliseconds - 1


def left_out_errors(data: Sequence[Measurement]) -> list[float]:
    """Each run's error by a fit to all that are not of its setup."""
    fits = {
        setup: fit([one for one in data if one.setup != setup]) for setup in dict.fromkeys(one.setup for one in data)
    }
    return [error(one, fits[one.setup]) for one in data]


def accuracy(data: Sequence[Measurement], left_out: Sequence[float], kind: str, times: StepConstants) -> Accuracy:
    """How far estimates of one kind are off.

    Args:
        left_out: of `left_out_errors`, by run.
    """
    mine = [one for one in data if one.kind == kind]

    def median(wanted: Callable[[Measurement], bool]) -> float:
        return float(np.median([abs(error(one, times)) for one in mine if wanted(one)]))

    ratios = [1 / (1 + error(one, times)) for one in mine if one.stranger]
    low, high = np.quantile(ratios, _TAIL, method="lower"), np.quantile(ratios, 1 - _TAIL, method="higher")
    others = [abs(off) for one, off in zip(data, left_out, strict=True) if one.kind == kind]
    return Accuracy(
        fitted=median(lambda one: not one.run.held_out),
        held_out=median(lambda one: one.run.held_out),
        strangers=median(lambda one: one.stranger),
        left_out=float(np.median(others)),
        low=float(low),
        high=float(high),
    )
