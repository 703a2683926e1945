# SPDX-License-Identifier: Apache-2.0
"""On the eager target a number is computed alike wherever it stands and however many stand beside it, and as torch computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import eager_runner, examples, prefill_pieces, random_tokens, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear, scaled_dot_product_attention

from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.targets.equal_rows import EqualRows


KEYS, VALUES, WEIGHT = (torch.randn(*sizes) for sizes in ((1, 2, 64, 24), (1, 2, 64, 12), (24, 40)))
FEW = torch.randn(2, 96)
ACTIVATIONS = (torch.sigmoid, functional.silu, functional.gelu, functional.softplus, functional.logsigmoid)
# From rows `[1, 2, rows, 24]` to `[1, 2, rows, n]`: each by itself.
COMPUTE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: linear(x, WEIGHT.t()),
    "two outputs": lambda x: linear(x.repeat(1, 1, 1, 4), FEW),
    "matmul": lambda x: x @ WEIGHT,
    "a vector": lambda x: (x @ WEIGHT[:, 0])[..., None],
    "tokens as columns": lambda x: torch.matmul(WEIGHT.t(), x.transpose(2, 3)).transpose(2, 3),
    "with a bias": lambda x: torch.addmm(FEW[0, :40], x.flatten(0, 2), WEIGHT).view(*x.shape[:3], 40),
    "batches": lambda x: torch.matmul(x, KEYS.transpose(2, 3)),
    "attention": lambda x: scaled_dot_product_attention(x, KEYS, VALUES, attn_mask=torch.zeros(x.shape[-2], 64)),
    "norm": lambda x: functional.rms_norm(x, (24,)) + functional.layer_norm(x, (24,)),
    "elementwise": lambda x: (
        x.exp() + x.sin() * x.cos() + x.tanh() + (x.abs() + 1).log() + x.erf() + x.pow(2.5).nan_to_num()
    ),
    "activations": lambda x: sum(each(x) for each in ACTIVATIONS),
    "in place": lambda x: x.clone().exp_().sub_(1).sigmoid_(),
    "gates": lambda x: functional.glu(x),
    "a turned sum": lambda x: (
        x.transpose(2, 3).contiguous().sum(2)[..., None] + x.transpose(2, 3).contiguous().mean(2)[..., None]
    ),
    "a turned softmax": lambda x: x.transpose(2, 3).contiguous().softmax(2).transpose(2, 3),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_a_row_depends_neither_on_its_place_nor_on_how_many_there_are(name: str) -> None:
    row = torch.randn(24)

    @examples(40)
    @given(st.integers(1, 300), st.data())
    def check(rows: int, data: st.DataObject) -> None:
        x, place = torch.randn(1, 2, rows, 24), data.draw(st.integers(0, rows - 1))
        x[0, 0, place] = row
        with EqualRows():
            expected = COMPUTE[name](row.expand(1, 2, 1, 24))[0, 0, 0]
            found = COMPUTE[name](x)
        assert torch.equal(found[0, 0, place], expected)
        torch.testing.assert_close(found, COMPUTE[name](x))

    check()


def _by_softmax(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention as models write it down."""
    scores = query @ keys.transpose(-1, -2) + mask
    return torch.softmax(scores, -1) @ values


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, _by_softmax])
def test_attention_does_not_depend_on_columns_that_are_not_seen(attend: Callable[..., Tensor]) -> None:
    query, keys, values = (torch.randn(1, 2, count, 24) for count in (20, 1400, 1400))

    @examples(80)
    @given(st.integers(1, 700), st.integers(0, 700), st.integers(0, 700))
    def check(seen: int, more: int, many: int) -> None:
        mask = torch.where(torch.arange(1400) < seen, 0.0, -1e9)
        found = []
        for columns in (seen + more, seen + many):
            with EqualRows():
                found.append(
                    attend(query, keys[:, :, :columns], values[:, :, :columns], mask[:columns].expand(20, -1))
                )
        assert torch.equal(*found)
        torch.testing.assert_close(
            found[0], _by_softmax(query, keys, values, mask) if attend is _by_softmax else found[1]
        )

    check()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_prompt_gives_the_same_bits_in_graphs_of_all_contexts(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec], name: str
) -> None:
    prompt, found = random_tokens(23, seed=3), []
    for context in (31, 59, 128, 130, 300, 480, 530):
        config = tiny_config(sequence_length=context, context_buckets=(context,))
        found.append(
            prefill_pieces(eager_runner(tiny_models[name], config, spec=tiny_specs[name]), 0, prompt, [8, 8, 7])
        )
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((), {"is_causal": True}),
        ((None, 0.0, True), {"scale": 0.5}),
        ((torch.ones(1, 1, 1, 64, dtype=torch.bool),), {}),
        ((), {"attn_mask": torch.ones(9, 64, dtype=torch.bool).tril(5)}),
    ],
)
def test_attention_that_a_models_own_code_calls_is_torchs(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 9, 24)
    expected = scaled_dot_product_attention(query, KEYS, VALUES, *args, **options)
    with EqualRows():
        found = scaled_dot_product_attention(query, KEYS, VALUES, *args, **options)
    torch.testing.assert_close(found, expected)
