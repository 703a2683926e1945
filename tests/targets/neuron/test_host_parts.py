# SPDX-License-Identifier: Apache-2.0
"""What operators compute without a sort, what graphs need here, which codes targets read, and what ranks hold of a state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from optimum_neuron.checkpoints.quantize.rounding import round_fp8, round_int8
from optimum_neuron.step.features.codes.modules import QuantizedLinear
from optimum_neuron.targets.neuron.lowering.decompositions import LARGEST_K, top_k
from optimum_neuron.targets.neuron.operators.codes import check_weight_types
from optimum_neuron.targets.neuron.run.load_plan import join_states, split_state
from optimum_neuron.targets.neuron.sdk import stacks as requirements
from optimum_neuron.targets.neuron.sharding.plan import PADDING
from optimum_neuron.tools.certify.reference import real_heads, take_part


def test_what_reads_graphs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_is_there", lambda module: module != "google.protobuf")
    with pytest.raises(RuntimeError, match="takes protobuf, which is not installed here; pip install protobuf"):
        requirements.check_reading()
    with pytest.raises(RuntimeError, match="graphs in HLO need protobuf, which is not installed with torch"):
        requirements.check_lowering()


def model(largest: float) -> nn.Module:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    layers = {"first": QuantizedLinear(round_int8(weight)), "second": QuantizedLinear(round_fp8(weight, largest))}
    return nn.ModuleDict(layers)


def test_codes_that_a_target_reads_as_infinity_are_refused() -> None:
    check_weight_types(model(448.0), "trn3")
    for target in ("inf2", "trn1", "trn2"):
        check_weight_types(model(240.0), target)
        told = f"second has codes of fp8 up to 448, and the largest of target='{target}' is 240; use target='trn3', or pass --deq"
        with pytest.raises(ValueError, match=told):
            check_weight_types(model(448.0), target)
    broken = model(240.0)
    broken["second"].codes.view(torch.uint8)[3, 2] = 0x7F  # type: ignore[index]
    with pytest.raises(ValueError, match="codes of fp8 up to nan"):
        check_weight_types(broken, "trn2")


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 5, 2), 1), ((3, 2, 4), 2)])
def test_the_parts_of_a_state_are_its_heads_or_its_channels(shape: tuple[int, ...], dim: int) -> None:
    state = torch.randn(shape)
    parts = [torch.from_numpy(each) for each in split_state(state.numpy(), 2)]
    assert [each.shape[dim] for each in parts] == [2, 2]
    assert np.array_equal(join_states([each.numpy() for each in parts]), state)
    for rank, own in enumerate(parts):
        assert torch.equal(take_part(state, (2 * rank, 2 * rank + 1)), own)
    padded = take_part(state, (3, PADDING))
    assert torch.equal(padded.select(dim, 0), state.select(dim, 3)) and not padded.select(dim, 1).any()
    assert real_heads((3, PADDING)) == [0] and real_heads((3, 2)) is None
    with pytest.raises(ValueError, match="a state of 4 heads or channels is not that of 3 ranks"):
        split_state(state.numpy(), 3)


# Whole numbers, which are often equal, numbers that are not finite, and the smallest that is.
NUMBERS = ([-2.0, -1.0, 0.0, -0.0, 1.0, 2.0], [torch.nan, -torch.inf, torch.inf, torch.finfo(torch.bfloat16).min, 1.0])


def first_of_equals(x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


@examples(150)
@given(
    st.integers(0, 2**32),
    st.integers(1, LARGEST_K),
    st.integers(0, 48),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([-1, 0, 1]),
    st.sampled_from([None, *NUMBERS, [-torch.inf], [torch.nan]]),
)
def test_it_is_the_beginning_of_a_stable_sort(
    seed: int, k: int, more: int, dtype: torch.dtype, dim: int, numbers: list[float] | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = [3, 3]
    shape[dim] = k + more
    x = torch.randn(shape, generator=generator)
    if numbers is not None:
        x = torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=generator)]
    x = x.to(dtype)
    (values, indices), (expected, places) = top_k(x, k, dim), first_of_equals(x, k, dim)
    assert torch.equal(indices, places) and values.dtype == dtype
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, torch.topk(x, k, dim).values, rtol=0, atol=0, equal_nan=True)
