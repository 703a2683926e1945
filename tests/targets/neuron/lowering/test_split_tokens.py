# SPDX-License-Identifier: Apache-2.0
"""Of sums over ranks each rank takes its part of the tokens where that takes less time, and computes the same bits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import tiny_config
from lowered import lower_function
from tiny import TINY_CONFIGS
from torch import Tensor

from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering import split_tokens
from optimum_neuron.targets.neuron.lowering.lower_all import lower_all
from optimum_neuron.targets.neuron.lowering.split_tokens import (
    Exchange,
    SumsRule,
    TokenRegions,
    compare_forms,
    is_split,
)
from optimum_neuron.targets.neuron.operators.collectives import all_reduce
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS, chip_of
from optimum_neuron.tools.certify.host_ranks import GraphRun, LoweredModule, execute_ranks
from optimum_neuron.tools.certify.setup import smaller_config, split_kinds


# Functions of `x [1, tokens, WIDTH]`, which ranks add up, and of weights `[WIDTH]` and twice `[WIDTH, WIDTH]`.
RANKS, TOKENS, WIDTH = 2, 8, 16
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def summed(x: Tensor) -> Tensor:
    return all_reduce(x, RANKS)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * (1 / WIDTH) + 1e-6) * scale


def block(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Two sums on a residual stream, two layers that read the first norm, and a head."""
    stream = summed(x)
    norm = normed(stream, scale)
    stream = stream + summed(torch.relu(norm @ one) * (norm @ other))
    return normed(stream, scale) @ one


def needed_whole_within(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Two layers read some of all tokens, and what follows of it is split."""
    first = torch.relu(summed(x)) * scale
    second = torch.tanh(first)
    return (second + summed(first @ one) + summed(second @ other)) @ one


def joined_twice(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """What follows from two sums meets one of them again."""
    first, second = torch.relu(summed(x)), torch.relu(summed(x @ other))
    return (torch.tanh(second) * (first + second)) @ one


def summed_again_and_added(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    stream = torch.relu(summed(x))
    return normed(stream + summed(torch.tanh(stream)), scale) @ one


def each_with_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A token meets all others: tokens are in two dimensions."""
    stream = torch.relu(summed(x[0]))
    return (stream[:, None] * stream[None]).sum(-1)


def largest_of_each(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A reduction with two results."""
    values, places = torch.relu(summed(x)).max(-1)
    return values * places


# Whatever is computed of a sum is computed of each token alone.
TOKEN_BY_TOKEN: dict[str, Function] = {
    # The dimension of the tokens comes to lie in front, and behind others; or there are as many as rows before them.
    "reduced before": lambda x, scale, one, other: (
        normed(torch.relu(summed(x.view(2, TOKENS // 2, WIDTH))).sum(0), scale) @ one
    ),
    "repeated": lambda x, scale, one, other: (torch.tanh(summed(x))[0][None].expand(3, -1, -1) * scale).sum(0),
    "cut behind": lambda x, *_: torch.tanh(torch.relu(summed(x.view(4, 4, 8))).view(4, 4, 2, 4)) * 2.0,
    # What meets the sums is the same for all tokens, and has a place for each.
    "constants": lambda x, scale, one, other: normed(summed(x) + torch.full((TOKENS, 1), 0.5) * scale, scale) @ one,
    "joined twice": joined_twice,
    "summed again and added": summed_again_and_added,
    "scaled by one of all": lambda x, scale, one, other: normed(summed(x) * summed(x @ other).amax(), scale) @ one,
    "each with each": each_with_each,
    "largest of each": largest_of_each,
    "clamped": lambda x, scale, one, other: normed(summed(x).clamp(-1.5, 0.5).clamp(min=-scale.amax()), scale) @ one,
}


def meeting(make: Callable[[Tensor], Tensor]) -> Function:
    return lambda x, scale, one, other: normed(summed(x) + make(x), scale) @ one


# A product takes sums whole, a reduction is over tokens, or what meets the sums is another one for each token.
WHOLE_SUMS: tuple[Function, ...] = (
    lambda x, scale, one, other: summed(x) @ one,
    lambda x, scale, one, other: summed(x).sum(1) * scale,
    meeting(lambda x: x),
    meeting(lambda x: x.sum(-1, keepdim=True)),
    meeting(lambda x: torch.tanh(x.flatten()).view(x.shape)),
    meeting(lambda x: torch.tanh(x[0])[None]),
)

SPLIT = SumsRule(chip_of("trn2"), (), split=True)
WHOLE = SumsRule(chip_of("trn2"), (), split=False)


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, tokens, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def collectives(graph: LoweredGraph) -> dict[str, int]:
    names = (each.opcode for _, each in hlo.instructions(hlo.parse(graph.hlo)))
    return dict(Counter(name for name in names if name in ("all-reduce", "reduce-scatter", "all-gather")))


def test_what_follows_from_sums_token_by_token_is_computed_of_a_part_and_gathered_once() -> None:
    whole, split = (lower_function(block, inputs(), RANKS, sums) for sums in (WHOLE, SPLIT))
    assert collectives(whole) == {"all-reduce": 2}
    assert collectives(split) == {"reduce-scatter": 2, "all-gather": 2}
    entry = hlo.entry(hlo.parse(split.hlo)).instructions
    shapes = {(each.opcode, *each.shape.dimensions) for each in entry}
    half = TOKENS // RANKS
    assert {("reduce-scatter", 1, half, WIDTH), ("add", 1, half, WIDTH), ("reduce", 1, half)} <= shapes
    assert ("all-gather", 1, TOKENS, WIDTH) in shapes and ("add", 1, TOKENS, WIDTH) not in shapes
    assert not lint("function", split.hlo, split.io, "trn2")  # all ranks take part, for one


def test_parts_of_tokens_compute_the_bits_of_all_whatever_their_shape_and_rank() -> None:
    modules, runs = {}, []
    rolled = ("block", "needed whole within")
    for name, function in {"block": block, "needed whole within": needed_whole_within, **TOKEN_BY_TOKEN}.items():
        for form, sums in (("whole", WHOLE), ("split", SPLIT)):
            graph = lower_function(function, inputs(), RANKS, sums)
            assert is_split(graph.hlo) == (form == "split"), name
            modules[f"{name} {form}"] = LoweredModule(graph.hlo, graph.io)
            for turn in (0, 3) if name in rolled else (0,):
                given = {f"x.{place}": each if place else each.roll(turn, 1) for place, each in enumerate(inputs())}
                runs.append(GraphRun(f"{name} {form}", {each: given[each] for each in graph.io.names("input")}))
    for rank in execute_ranks(modules, [()] * RANKS, runs):
        found: dict[str, list[Tensor]] = {}
        for run, outputs in zip(runs, rank[:-1], strict=True):  # the states come last
            found.setdefault(run.graph, []).append(outputs["y"])
        for name in (run.graph.removesuffix(" whole") for run in runs if run.graph.endswith(" whole")):
            whole, split = found[f"{name} whole"], found[f"{name} split"]
            assert all(map(torch.equal, whole, split)), name
            assert len(split) == 1 or torch.equal(split[1], split[0].roll(3, 1)), name


@pytest.mark.parametrize(
    ("function", "tokens"), [(block, TOKENS - 1), (block, RANKS), *((function, TOKENS) for function in WHOLE_SUMS)]
)
def test_sums_stay_whole_where_tokens_cannot_be_split_or_nothing_is_saved(
    function: Callable[..., Tensor], tokens: int
) -> None:
    assert "reduce-scatter" not in collectives(lower_function(function, inputs(tokens), RANKS, SPLIT))


def test_a_weight_that_is_another_one_on_each_rank_meets_no_part_of_the_tokens() -> None:
    graph = lower_function(lambda x, scale, one, other: torch.tanh(summed(x)) * scale @ one, inputs(), RANKS, WHOLE)
    module = hlo.parse(graph.hlo)
    names = {each.id: each.opcode for _, each in hlo.instructions(module)}

    def met(shared: set[int]) -> set[str]:
        return {names[each] for region in TokenRegions(module, RANKS, shared).find() for each in region.dims}

    everything = set(range(len(graph.io.inputs)))
    assert {"tanh", "multiply"} <= met(everything)
    without_scale = met(everything - {graph.io.names("input").index("x.1")})
    assert "tanh" in without_scale and "multiply" not in without_scale


def forms_of(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> tuple[Exchange, Exchange]:
    """Both forms of the sums of a function, of which one is used whole by a product."""
    graph = lower_function(function, inputs(dtype=dtype), RANKS, WHOLE)
    (region,) = TokenRegions(hlo.parse(graph.hlo), RANKS, range(len(graph.io.inputs))).find()
    return region.whole, region.split


def test_moved_numbers_cost_nothing_in_either_form() -> None:
    """A norm: a square, its sum and what it is divided by, of each token a mean, an addition and a root, and two products."""
    whole, split = forms_of(lambda x, scale, one, other: normed(all_reduce(x, RANKS), scale) @ one)
    assert whole.elements == {4: 4 * TOKENS * WIDTH + 3 * TOKENS} and whole.collectives == 1
    assert split.elements == {4: whole.elements[4] // RANKS} and split.collectives == 2


def test_sums_in_float32_are_split_where_their_results_are_gathered_in_no_wider_type() -> None:
    def narrow(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return normed(all_reduce(x.float(), RANKS).to(x.dtype), scale) @ one

    def wide(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return normed(all_reduce(x, RANKS).float(), scale.float()) @ one.float()

    (whole, split), size = forms_of(narrow, torch.bfloat16), TOKENS * WIDTH
    assert whole.sent == 4 * size and split.sent == 2 * size + size
    graphs = [lower_function(each, inputs(dtype=torch.bfloat16), RANKS, SPLIT) for each in (narrow, wide)]
    assert is_split(graphs[0].hlo) and collectives(graphs[1]) == {"all-reduce": 1}


def test_what_is_gathered_for_one_reader_serves_all_that_follows_from_it() -> None:
    """The conversion is of no use to gather; without it nothing is saved by computing the other on parts."""

    def function(x: Tensor, scale: Tensor, one: Tensor, other: Tensor) -> Tensor:
        stream = torch.relu(all_reduce(x, RANKS))
        return stream.float() @ one.float() + (torch.tanh(stream) @ other).float()

    graph = lower_function(function, inputs(dtype=torch.bfloat16), RANKS, SPLIT)
    assert collectives(graph) == {"reduce-scatter": 1, "all-gather": 1}


@pytest.mark.parametrize(
    ("target", "ranks", "tokens", "expected"),
    [("trn2", 8, 512, False), ("trn2", 8, 2048, True), ("trn1", 8, 512, True), ("trn2", 64, 1024, False)],
)
def test_tokens_are_split_where_operators_save_more_than_collectives_wait(
    target: str, ranks: int, tokens: int, expected: bool
) -> None:
    """Two sums, what is gathered, and operators of a norm and a residual, twice, in bfloat16."""
    sums, elements = [2 * tokens * 4096] * 2, Counter({4: 8 * tokens * 4096, 2: 2 * tokens * 4096})
    whole, split = compare_forms(sums, sums, elements, ranks)
    assert split.sent == whole.sent
    assert (split.seconds(CHIPS[target], ranks) < whole.seconds(CHIPS[target], ranks)) == expected
    whole, split = compare_forms(sums, sums * 2, elements, ranks)
    assert split.sent > whole.sent


def test_each_graph_has_the_form_that_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a latency that makes the choice differ between graphs."""
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    config = tiny_config(target="trn2", tensor_parallel_size=2, batch_size=4, dtype="bfloat16")
    monkeypatch.setattr(split_tokens, "COLLECTIVE_S", 2e-9)
    steps = itertools.islice(lower_all(tmp_path, config, {}, trust_remote_code=False), len(graph_specs(config)))
    found = {(each.kind, is_split(each.hlo)) for each in steps}
    assert {("token_generation", False), ("mixed", True)} <= found


@pytest.mark.parametrize(("batch", "rows", "chunk", "ranks"), [(33, 1, 512, 8), (6, 2, 250, 4), (64, 64, 16, 8)])
def test_what_is_executed_of_a_large_model_can_be_split_as_its_artifact_can(
    batch: int, rows: int, chunk: int, ranks: int
) -> None:
    config = tiny_config(
        target="trn2", tensor_parallel_size=ranks, batch_size=batch, ctx_batch_size=rows, prefill_chunk_size=chunk,
        sequence_length=4096, context_buckets=(4096,),
    )  # fmt: skip
    small = smaller_config(config)
    assert small.batch_size <= batch and small.prefill_chunk_size <= 128
    if rows == 64:  # many rows leave so little room that no number of tokens divides as the artifact's: there are some
        assert small.prefill_chunk_size == 7
    else:
        assert (batch - small.batch_size) % ranks == (chunk - small.prefill_chunk_size) % ranks == 0


def test_the_kinds_of_an_artifact_s_graphs_that_are_split_are_those_of_the_largest(tmp_path: Path) -> None:
    config = tiny_config(target="trn2", tensor_parallel_size=2, prefill_chunk_buckets=(8,), prefill_chunk_size=16)
    (tmp_path / "graphs").mkdir()
    whole, split = (lower_function(block, inputs(), RANKS, sums).hlo for sums in (WHOLE, SPLIT))
    for spec in graph_specs(config):
        form = split if spec.kind == "chunked_prefill" and spec.chunk_size == 16 else whole
        (tmp_path / "graphs" / f"{spec.name}.hlo").write_bytes(form)
    assert split_kinds(tmp_path, config) == {"chunked_prefill"}
