# SPDX-License-Identifier: Apache-2.0
"""Limits: what is written, what answers have of them, and which requests keep them."""

from __future__ import annotations

from array import array

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.tools.tune.answers import Answer, Figures
from optimum_neuron.tools.tune.slo import Limit, Slo


LIMITS = st.builds(
    Limit,
    st.sampled_from(("ttft", "itl", "e2e")),
    st.integers(1, 100).map(float),
    st.integers(1, 10**6).map(lambda milliseconds: milliseconds * 1e-3),
)
ANSWERS = [Answer(0.0, 0.1, array("d", [1.0, 1.1, 1.2])), Answer(2.0, 2.5, array("d", [5.0, 5.3]))]


@given(limits=st.lists(LIMITS, min_size=1, max_size=4, unique_by=lambda limit: (limit.metric, limit.percentile)))
@examples(60)
def test_what_is_written_is_what_is_meant(limits: list[Limit]) -> None:
    written = ",".join(f"{each.metric}.p{each.percentile:g}={round(each.seconds * 1e3)}ms" for each in limits)
    assert Slo.parse_limits(written) == Slo(tuple(limits))


def test_units_and_the_default_percentile() -> None:
    assert Slo.parse_limits("ttft=2s, itl.p99.9=50ms,e2e.p50=.5s").limits == (
        Limit("ttft", 99, 2.0),
        Limit("itl", 99.9, 0.05),
        Limit("e2e", 50, 0.5),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'', which is no limit"),
        ("ttft", "'ttft', which is no limit"),
        ("ttft=2", "'ttft=2', which is no limit"),
        ("ttft=-2s", "no limit"),
        ("ttft=nans", "no limit"),
        ("ttft=1e3s", "no limit"),
        ("ttft<2s", "no limit"),
        ("ttft=2s,", "'', which is no limit"),
        ("ttft=0ms", "which nothing meets; give a time above 0"),
        ("ttft.p0=2s", "p0 is no percentile"),
        ("ttft.p101=2s", "p101 is no percentile"),
        ("tpot=2s", "'tpot' is no metric; choose one of ttft, itl, e2e"),
        ("ttft=2s,ttft.p99=3s", "limits ttft p99 twice"),
        (f"ttft={'9' * 400}s", "give a time above 0"),
    ],
)
def test_wrong_limits_are_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError) as raised:
        Slo.parse_limits(text)
    assert told in str(raised.value)


def test_shares_of_limits_and_requests_that_keep_them() -> None:
    slo = Slo.parse_limits("ttft.p50=2s,itl.p100=200ms")
    assert [round(share, 6) for share in slo.shares_used(ANSWERS).values()] == [1.0, 1.5]
    assert slo.attainment(ANSWERS) == 0.5
    one_token = [Answer(0.0, 0.0, array("d", [0.5]))]
    assert slo.shares_used(one_token) == {slo.limits[0]: 0.25, slo.limits[1]: 0.0} and slo.attainment(one_token) == 1


def test_figures_are_from_the_first_arrival_to_the_last_token() -> None:
    figures = Figures.from_answers(ANSWERS)
    assert figures.tok_s == pytest.approx(5 / 5.3) and figures.req_s == pytest.approx(2 / 5.3)
    assert figures.times["ttft"][50] == pytest.approx(2.0) and figures.times["queue"][50] == pytest.approx(0.3)
    assert figures.times["itl"][99] == pytest.approx(0.3, abs=0.01) and figures.times["e2e"][50] == pytest.approx(2.25)
