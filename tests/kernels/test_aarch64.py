# SPDX-License-Identifier: Apache-2.0
"""The kernels of aarch64, run by an emulator: a few calls of each kind, and a whole model. `make test-full` runs all tests of kernels so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import EMULATED
from helpers import Opener, artifact_runner, generate, random_tokens
from kernel_calls import (
    Kernels,
    Planned,
    all_same,
    check_chunks,
    check_linear,
    int32,
    load_kernels,
    random,
    same_bits,
    with_dtypes,
)
from test_attention_kernels import ATTEND_ERROR, attend_exactly, make_cache
from test_coded_kernels import FORMS, ROUNDED, of_form
from torch.nn.functional import gelu, silu

from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.bound_plan import BoundPlan


pytestmark = [
    pytest.mark.skipif(not EMULATED, reason="needs g++-aarch64-linux-gnu and qemu-user, on another architecture"),
    pytest.mark.usefixtures("torch_with_one_thread"),
]


# What is in "neon" is in "neon_bf16" too, but for products that AVX2 lacks as well. The vectors of sve512 have the lanes of AVX512.
_RARE = ("neon", "sve512")
_PARAMETERS = [pytest.param(each, marks=pytest.mark.full if each in _RARE else ()) for each in EMULATED]


@pytest.fixture(scope="module", params=_PARAMETERS)
def emulated(request: pytest.FixtureRequest, _compile_cache: None) -> Kernels:
    return load_kernels(request.param)


@with_dtypes
def test_linear_layers_are_exact_and_a_row_depends_on_nothing_else(emulated: Kernels, dtype: torch.dtype) -> None:
    weights, bias = [random(size, 203, dtype=dtype) for size in (37, 3)], random(37, dtype=dtype)
    x = random(60, 203, dtype=dtype)
    results = emulated.linears(x, weights, [bias, None])
    for result, weight, own in zip(results, weights, (bias, None), strict=True):
        check_linear(result, x, weight, own)
    for rows, threads in ((1, 1), (2, 2), (5, 3), (6, 2), (7, 2), (13, 2), (49, 1)):
        with emulated.with_threads(threads):
            fewer = emulated.linears(x[60 - rows :], weights, [bias, None])
        assert all_same(fewer, [whole[60 - rows :] for whole in results]), rows
    for form in FORMS:
        coded, x = of_form(form, 37, 96, group=48), random(29, 96, dtype=dtype)
        whole = emulated.linear(x, coded)
        check_linear(whole, x, coded)
        assert same_bits(emulated.linear(x[3:5], coded), whole[3:5])


@with_dtypes
def test_quantized_layers_with_activations_of_int8_have_the_bits_of_other_cpus(
    emulated: Kernels, best_kernels: Kernels, dtype: torch.dtype
) -> None:
    for form, (columns, group) in product(ROUNDED, ((256, 64), (1100, 110), (96, 32))):
        weight, x = of_form(form, 37, columns, group=group), random(19, columns, dtype=dtype)
        for part in (x[:1], x):
            assert same_bits(emulated.linear(part, weight), best_kernels.linear(part, weight)), (form, group)


@with_dtypes
@pytest.mark.parametrize("window", [0, 30])
def test_attention_is_exact_and_a_token_depends_on_nothing_else(
    emulated: Kernels, dtype: torch.dtype, window: int
) -> None:
    columns, tokens, dim = 151, 37, 48
    positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
    keys, values = make_cache(2, 2, columns + 9, (dim, dim), {1: columns - 1}, dtype)
    query = random(1, 6, tokens, dim, dtype=dtype)
    options = (dim**-0.5, window, 5.0, torch.randn(6))
    whole = emulated.attend(query, keys, values, int32([1]), positions, *options)
    exact = attend_exactly(query, keys, values, int32([1]), positions, *options)
    assert (whole.double() - exact).abs().max() < 2 * ATTEND_ERROR[dtype]
    slots, alone = torch.full((tokens,), 1, dtype=torch.int32), query.permute(2, 1, 0, 3)
    for threads in (1, 2):
        with emulated.with_threads(threads):
            decoded = emulated.attend(alone, keys, values, slots, positions[0][:, None].contiguous(), *options)
            part = query[:, :, 9:20], keys, values, int32([1]), positions[:, 9:20].contiguous()
            chunk = emulated.attend(*part, *options)
        assert same_bits(decoded[:, 0], whole[0]) and same_bits(chunk[0], whole[0, 9:20])


def test_maps_are_those_of_this_machine(emulated: Kernels, best_kernels: Kernels) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        half = (x * y).half().float()
        rows = x.softmax(-1), (x * x).mean(-1)
        return [silu(x) * y, gelu(x + y), x.bfloat16().float() - y, half, x.exp().tanh(), *rows]

    inputs = [torch.randn(7, 133) * 3 for _ in range(2)]
    results = [Planned(each, function, inputs)(*inputs) for each in (emulated, best_kernels)]
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


@pytest.mark.slow
def test_a_model_gives_the_tokens_of_the_eager_target_and_the_same_bits_however_it_is_chunked(
    emulated: Kernels, open_runner: Opener, cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_here = Plan.bind

    def bind(plan: Plan, *arguments: Any, **options: Any) -> BoundPlan:
        return bind_here(plan, *arguments, **options | {"library": emulated.library(plan.buffers)})

    monkeypatch.setattr(Plan, "bind", bind)
    runner, prompt = artifact_runner(cpu_artifact("llama")), random_tokens(21)
    tokens, logits = generate(runner, prompt, 6)
    expected, exact = generate(open_runner("llama"), prompt, 6)
    assert tokens == expected
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    check_chunks(runner, prompt)
