# SPDX-License-Identifier: Apache-2.0
"""The tuner's benchmark: its trace is the same each time, and what is compared is served over predicted."""

from __future__ import annotations

from array import array

import pytest

from benchmark.tune.__main__ import parse_arguments
from benchmark.tune.made_trace import LONGEST_ANSWER, LONGEST_PROMPT, made_trace
from benchmark.tune.report import Comparison
from optimum_neuron.tools.tune.answers import Answer, Figures


def test_the_made_trace_is_the_same_each_time_and_has_the_rate_asked_for() -> None:
    args = parse_arguments(["--requests", "400", "--rate", "4"])
    trace = made_trace(args)
    assert trace == made_trace(args) and trace != made_trace(parse_arguments(["--requests", "400", "--seed", "1"]))
    assert len(trace.requests) == 400 and 399 / trace.seconds == pytest.approx(4, rel=0.2)
    assert max(each.prompt_tokens for each in trace.requests) <= LONGEST_PROMPT
    assert min(each.new_tokens for each in trace.requests) >= 2
    assert max(each.new_tokens for each in trace.requests) <= LONGEST_ANSWER


def test_ratios_are_served_over_predicted() -> None:
    def figures(step: float) -> Figures:
        return Figures.of([Answer(0.0, 0.0, array("d", [step, 2 * step, 3 * step]))])

    compared = Comparison("a", figures(0.1), figures(0.2)).to_dict()["compared"]
    assert compared["TTFT p50, ms"] == {"predicted": 100.0, "served": 200.0, "ratio": 2.0}
    assert compared["ITL p90, ms"]["ratio"] == pytest.approx(2) and compared["tok/s"]["ratio"] == pytest.approx(0.5)
