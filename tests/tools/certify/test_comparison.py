# SPDX-License-Identifier: Apache-2.0
"""What executed modules make is compared with what is expected, number by number and row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from optimum_neuron.step.attention import kv_cache
from optimum_neuron.step.attention.coded_states import CodedStates
from optimum_neuron.step.spec import GREEDY
from optimum_neuron.tools.certify.comparison import (
    TIMES_ROUNDING,
    Comparison,
    Expected,
    ExpectedValues,
    as_steps,
    compare,
    expect_results,
    summarize,
)
from optimum_neuron.tools.certify.recording import RecordedStep
from optimum_neuron.tools.certify.reference import ReferenceRun, SamplerCall, write_moved


NOISE = 0.25  # by which a row may be off 4.0
LOGITS, KEYS = "decode.logits", "kv_cache.key_0"


def entry(place: str = "here", noise: float = NOISE) -> ExpectedValues:
    return ExpectedValues("logits", place, torch.zeros(2, 3), noise, (0, 1))


def compared(entries: Sequence[ExpectedValues], *found: float | Tensor | None, dtype: str = "float32") -> Comparison:
    """Compare logits of one step each, of which all numbers are alike, or that are missing."""
    results = [{} if each is None else {LOGITS: torch.zeros(2, 3) + each} for each in found]
    expected = Expected(dtype, {(number, LOGITS, 0): each for number, each in enumerate(entries)})
    (one,) = compare(expected, [results])
    return one


@pytest.mark.parametrize(("off", "holds"), [(4.0, True), (4.25, False), (math.nan, False), (math.inf, False)])
def test_a_difference_holds_up_to_its_bound(off: float, holds: bool) -> None:
    found = torch.zeros(2, 3)
    found[1, 2] = off
    one = compared([entry()], found)
    assert one.holds is holds and (one.bound, one.count) == (TIMES_ROUNDING * NOISE, 6)
    assert not compared([entry()], None).holds  # a result that is missing


@pytest.mark.parametrize("noise", [math.inf, math.nan])
def test_where_rounding_moves_numbers_without_bound_nothing_holds(noise: float) -> None:
    entries = [entry(), entry("there", noise)]
    for order in (entries, entries[::-1]):
        one = compared(order, 0.0, 0.0)
        assert not one.holds and one.place == "there"
        assert str(one) == "logits in float32 cannot be compared at there, where the eager step makes infinity or NaN"


def test_of_several_the_one_nearest_to_its_bound_is_told_with_the_count_of_all() -> None:
    entries = [entry("far"), entry("near"), entry("further"), entry("exact", 0.0)]
    one = compared(entries, 1.0, 3.0, 2.0, 0.0)
    assert (one.place, one.difference, one.count, one.holds) == ("near", 3.0, 24, True)
    one = compared(entries, 5.0, 3.0, 50.0, 0.0)
    assert (one.place, one.difference, one.holds) == ("further", 50.0, False)
    one = compared(entries, 5.0, 3.0, 50.0, 1e-9)  # of what nothing moves, anything is too much
    assert one.place == "exact" and not one.holds


def test_in_a_16_bit_type_the_mean_of_all_rows_of_a_graph_is_compared() -> None:
    one = compared([entry(), entry()], 10.0, 0.0, dtype="bfloat16")
    assert (one.difference, one.count, one.holds) == (5.0, 12, False)
    assert compared([entry(), entry()], 0.0, 4.0, dtype="bfloat16").holds


def test_every_rank_has_to_choose_an_accepted_token_in_every_row() -> None:
    expected = Expected("float32", tokens={(0, "decode.tokens"): {0: (3, 4), 2: (5,)}})
    right, wrong = ({"decode.tokens": torch.tensor(tokens)} for tokens in ([4, 9, 5], [4, 5, 9]))
    cases = ((right, "", 0), (wrong, "step 0, row 2, rank 1", 1), ({}, "step 0, row 0, rank 1", 2))
    for other, place, difference in cases:
        (one,) = compare(expected, [[right], [other]])
        assert (one.holds, one.count, one.place, one.difference) == (not difference, 4, place, difference)


def references() -> tuple[ReferenceRun, ReferenceRun, list[RecordedStep]]:
    """One step with a row in use and one without, and a state whose last row takes padding; and the same moved."""
    step = RecordedStep("token_generation", {}, {"decode": (0,)}, ((0, 1),))
    made = []
    for shift in (0.0, 1.0):
        logits = torch.tensor([[shift, 8.0, 0.0], [100 * shift, 0.0, 0.0]])
        sampler = SamplerCall(logits * 2, (torch.tensor([GREEDY] * 2), torch.zeros(2)))
        keys = torch.cat([torch.full((1, 1, 4, 2), 3.0 + shift / 2), torch.full((1, 1, 4, 2), 1000 * shift)])
        made.append(ReferenceRun({(0, LOGITS): logits}, {(0, "decode.tokens"): sampler}, {KEYS: keys}, {KEYS: 1}))
    return made[0], made[1], [step]


def test_noise_is_of_rows_in_use_and_of_states_without_what_padding_writes() -> None:
    expected = expect_results(*references(), "float32", 2, None)
    # Of a graph that returns tokens alone, the logits by which it chose them.
    noises = {key: each.noise for key, each in expected.outputs.items() if key[0] == 0}
    assert noises == {(0, LOGITS, 0): 2.0, (0, LOGITS, 1): 2.0}
    state = expected.outputs[1, KEYS, 1]
    assert (state.subject, state.noise, state.values.tolist()) == ("states: key", 0.5, [[[[3.0, 3.0]] * 4]])
    assert expected.tokens[0, "decode.tokens"] == {0: (0, 1, 2)}  # within 32 of the largest


def test_codes_are_compared_by_their_order_and_one_that_is_no_number_is_beyond_all_bounds() -> None:
    floats = torch.tensor([-448.0, -(2.0**-9), 0.0, 2.0**-9, 240.0, 256.0]).to(torch.float8_e4m3fn)
    assert as_steps(floats).tolist() == [-126, -1, 0, 1, 119, 120]
    assert as_steps(torch.tensor([-127, 5], dtype=torch.int8)).tolist() == [-127, 5]
    assert summarize(torch.empty(0), "float32") == 0.0
    assert summarize(torch.tensor([-torch.inf, torch.inf]), "bfloat16") == torch.inf
    assert summarize(as_steps(torch.tensor([torch.nan]).to(torch.float8_e4m3fn)), "float32") == torch.inf


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_moved_codes_are_each_heads_own_but_for_the_next_code_of_one(dtype: torch.dtype) -> None:
    own, moved = (CodedStates(torch.zeros(1, 2, 4, 8, dtype=dtype), torch.zeros(1, 2, 4, 1)) for _ in range(2))
    states = torch.randn(4, 2, 8)
    states[3] = 0
    places = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    kv_cache.write_tokens(own, states, *places)
    write_moved(moved, states, *places)
    difference = (as_steps(moved.codes) - as_steps(own.codes)).abs()
    assert difference.sum(-1).eq(1).all() and torch.equal(moved.scale, own.scale)
    assert as_steps(moved.codes).abs().max() <= as_steps(own.codes).abs().max()
