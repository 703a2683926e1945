# SPDX-License-Identifier: Apache-2.0
"""Experts are computed in one of several forms, all exact for any routing, and the cost model chooses by what each moves and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_layers import call_of, lower_form, one_by_one, run_form, weights_of
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optimum_neuron.checkpoints.quantize.rounding import round_int4, round_int8
from optimum_neuron.step.features.codes.modules import replace_weights
from optimum_neuron.step.features.experts.experts import ExpertsCall
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.cost import graph_cost
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.operators import expert_forms
from optimum_neuron.targets.neuron.operators.expert_forms import ExpertForm, ExpertLayer, all_experts, blocks, gather
from optimum_neuron.targets.neuron.operators.experts import block_places, expert_layer, in_form
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS


TOKENS, EXPERTS, PER_TOKEN, HIDDEN, INNER = 40, 8, 3, 64, 40
CHIP = CHIPS["trn2"]
NOISE = 5e-6  # of sums of numbers up to 10, in float32
# By name: no row at a time, parts that are not of one size, blocks of few and of many rows.
FORMS = {
    "all": all_experts(TOKENS),
    "gather": ExpertForm(0, TOKENS * PER_TOKEN, 1, 50),
    "blocks of 4": ExpertForm(4, 29, 4, 12),
    "blocks of 16": ExpertForm(16, 7, 16, 7),
    "blocks of 32": ExpertForm(32, 3, 32, 2),
}


def routing(kind: str, seed: int = 0, tokens: int = TOKENS) -> Tensor:
    """`[tokens, k]`, as routers give it."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:PER_TOKEN] for _ in range(tokens)])
    if kind == "padded":
        index[torch.rand(tokens, generator=generator) < 0.4] = EXPERTS
    elif kind == "one expert":
        index[:, 0], index[:, 1:] = 5, EXPERTS
    elif kind == "one set":
        index[:] = torch.tensor([2, 7, 0])
    elif kind == "nowhere":
        index[:] = EXPERTS
    elif kind == "an expert twice":
        index[:, 1] = index[:, 0]
    return index


ROUTINGS = ("random", "padded", "one expert", "one set", "nowhere", "an expert twice")


def layer_call(kind: str, seed: int = 0, *, tokens: int = TOKENS, **options: Any) -> ExpertsCall:
    """A layer of experts with `weights_of` these options, and tokens for it."""
    tensors = weights_of(EXPERTS, HIDDEN, INNER, **options)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(tensors[0].dtype)
    weights = torch.rand(tokens, PER_TOKEN, generator=generator).to(tensors[0].dtype)
    return call_of(hidden, routing(kind, seed, tokens), weights, tensors, transposed=options.get("transposed", False))


@torch.no_grad()
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_what_each_token_s_experts_do(form: str, kind: str, biases: bool) -> None:
    call = layer_call(kind, transposed=biases, biases=biases)
    found = in_form(call, FORMS[form])
    assert (found.double() - one_by_one(call)).abs().max() < NOISE
    nowhere = (call.index == EXPERTS).all(1)
    assert not found[nowhere].any() and (nowhere.all() or found[~nowhere].any(1).all())


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_with_codes(form: str) -> None:
    call = layer_call("random")
    rounded = {"gate_up_proj": round_int4(call.up, 16), "down_proj": round_int8(call.down)}
    values = tuple(each.dequantize() for each in rounded.values())
    plain = call_of(call.hidden_states, call.index, call.weights, values)
    layer = nn.Module()
    for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"):
        setattr(layer, name, getattr(call.layer, name))
    for name in rounded:
        layer.register_parameter(name, nn.Parameter(getattr(call.layer, name)))
    replace_weights(layer, rounded)
    found = in_form(replace(call, layer=layer), FORMS[form])
    assert (found.double() - one_by_one(plain)).abs().max() < NOISE


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_reaches_no_other_token(form: str) -> None:
    call = layer_call("random")
    call.down[6] = torch.finfo(torch.float32).max  # overflows whoever comes there
    call.index[call.index == 6] = 1
    call.index[3] = EXPERTS
    broken = replace(call, hidden_states=call.hidden_states.clone(), weights=call.weights.clone())
    broken.hidden_states[[0, 3, 9]], broken.weights[[0, 3, 9]] = torch.nan, torch.nan
    sound = [token for token in range(TOKENS) if token not in (0, 3, 9)]
    found = in_form(broken, FORMS[form])
    assert torch.equal(found[sound], in_form(call, FORMS[form])[sound])
    assert found[[0, 9]].isnan().all() and found[sound].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "all"])
def test_places_and_neighbours_change_no_bit_of_a_graph_s_tokens(form: str, dtype: str) -> None:
    call = layer_call("padded", dtype=dtype)
    graph = lower_form(FORMS[form], call)
    assert not lint("function", graph.hlo, graph.io, "trn2")
    opcodes = {each.opcode for _, each in hlo.instructions(hlo.parse(graph.hlo))}
    assert not opcodes & {"sort", "reduce-window", "while", "dynamic-slice", "custom-call"}
    expected = run_form(graph, call)
    if dtype == "float32":
        assert (expected.double() - one_by_one(call)).abs().max() < NOISE
    fields, tokens = ("hidden_states", "index", "weights"), [0, 21, TOKENS - 1]
    for seed in range(4):
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))
        moved = replace(call, **{each: getattr(call, each)[order] for each in fields})
        assert torch.equal(run_form(graph, moved), expected[order])
    for kind in ROUTINGS:
        other = layer_call(kind, 9, dtype=dtype)
        for each in fields:
            getattr(other, each)[tokens] = getattr(call, each)[tokens]
        assert torch.equal(run_form(graph, other)[tokens], expected[tokens])


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """A routing, how many experts there are, and rows of a block."""
    experts, per_token = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    tokens, rows = draw(st.integers(1, 300)), 1 << draw(st.integers(0, 6))
    skewed = draw(st.integers(1, experts + 1))  # few are popular
    seed = draw(st.integers(0, 1000))
    index = torch.randint(0, skewed, (tokens, per_token), generator=torch.Generator().manual_seed(seed))
    return index.int(), experts, rows


@examples(200)
@given(routings())
def test_each_entry_has_a_place_of_its_own_in_a_block_of_its_expert(case: tuple[Tensor, int, int]) -> None:
    index, experts, rows = case
    gathered = (index.numel() - 1) // rows
    place, owners = block_places(index, experts, rows, gathered)
    used = index < experts
    places = place[used].tolist()
    assert len(set(places)) == len(places) and all(0 <= each < (experts + gathered) * rows for each in places)
    expert_of = torch.cat([torch.arange(experts, dtype=torch.int32), owners])
    assert ((owners >= 0) & (owners < experts)).all()
    assert torch.equal(expert_of[place[used] // rows], index[used])
    # The first of an expert's tokens lie where its weights do, and blocks behind are as few as can be.
    count = Counter(index[used].tolist())
    further = {int(each) // rows for each in places if each >= experts * rows}
    assert len(further) == sum(-(-number // rows) - 1 for number in count.values()) <= gathered
    assert -(-index.numel() // rows) - 1 == gathered  # as many as all to one expert need


@pytest.mark.parametrize("make", [gather, lambda *of: blocks(*of[:2], 8, of[2]), lambda *of: all_experts(of[1])])
def test_work_is_what_the_lint_counts(make: Callable[..., ExpertForm], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a chip with 32 KiB, as graphs of real sizes have too little memory on a real one."""
    call = layer_call("random", transposed=True, tokens=24)
    layer = expert_layer(call)
    small = replace(CHIP, sbuf=16 << 10)
    for chip in (CHIP, small):
        monkeypatch.setitem(CHIPS, "trn2", chip)
        form = make(layer, 24, chip)
        expected, graph = expert_forms.work(layer, 24, form, chip), lower_form(form, call)
        cost = graph_cost("function", graph.hlo, graph.io, "trn2")
        if chip is small:
            assert (expected.moved > expert_forms.work(layer, 24, form, CHIP).moved) == (form.kind != "blocks")
            assert cost.read + cost.written == pytest.approx(expected.moved, rel=0.1)
            continue
        counted = 2 * 128 * 128 * EXPERTS * (form.kind == "blocks")  # earlier tokens, by a product with a triangle
        assert cost.total_flops == expected.flops + counted
        rows = form.own_rows * EXPERTS + form.gathered * form.rows  # in the graph of a step, tokens are no inputs
        activations = 4 * (24 + rows) * (HIDDEN + 4 * PER_TOKEN)
        assert expected.moved <= cost.read + cost.written <= expected.moved + activations


MIXTRAL = ExpertLayer(8, 2, 4096, 2 * 14336 // 8, 14336 // 8, "bfloat16", 2)  # on each of 8 cores
QWEN3 = ExpertLayer(128, 8, 2048, 2 * 768, 768, "bfloat16", 2)


@pytest.mark.parametrize(
    ("layer", "tokens", "kind"),
    [
        (MIXTRAL, 1, "gather"),
        (MIXTRAL, 4, "all"),  # as many entries as experts
        (QWEN3, 4, "gather"),
        (QWEN3, 128, "all"),
        (QWEN3, 512, "blocks"),
        (MIXTRAL, 2048, "blocks"),
    ],
)
def test_the_form_with_the_least_time_is_chosen(layer: ExpertLayer, tokens: int, kind: str) -> None:
    assert expert_forms.choose(layer, tokens, CHIP).kind == kind


@given(st.integers(1, 256), st.integers(1, 8), st.integers(1, 5000), st.integers(0, 12), st.sampled_from(tuple(CHIPS)))
def test_parts_hold_all_blocks_and_are_few(experts: int, per_token: int, tokens: int, size: int, chip: str) -> None:
    layer = ExpertLayer(experts, per_token, 1 << size, 2 << size, 1 << size, "bfloat16", 2)
    for form in (gather(layer, tokens, CHIPS[chip]), blocks(layer, tokens, 128, CHIPS[chip])):
        parts = list(form.parts)
        assert [start for start, _ in parts] == [0, *(end for _, end in parts)][: len(parts)]
        assert len(parts) <= expert_forms.MOST_PARTS and (parts[-1][1] if parts else 0) == form.gathered
