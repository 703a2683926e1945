# SPDX-License-Identifier: Apache-2.0
"""A bias by the column of a key (ALiBi), of models that attend in code of their own: exact, and a token's bits its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import configs
from biased import BLOCKS, MODELS, model_of
from helpers import tiny_config
from torch import Tensor

from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.parity.text_length import check_tables
from optimum_neuron.step.attention.cached_attention import added_bias
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.attention.rows import AttentionCall
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.own_code.own_scores import BiasMask, ScoreKeys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_models_in_16_bits_are_taken(name: str, dtype: torch.dtype) -> None:
    model = model_of(name).to(dtype)
    try:
        assert len(inspect_model(model).states) == configs.LAYERS
    finally:
        model.float()


def test_what_is_read_as_attention_gathers_no_slots_and_attends_to_blocks_where_they_lie() -> None:
    for name in MODELS:
        needs = CacheNeeds.read_code(model_of(name))
        assert needs.biased and not needs.by_itself
        check_states(model_of(name), inspect_model(model_of(name), compare=False), tiny_config(**BLOCKS, target="hlo"))


def test_a_table_that_is_shorter_than_a_text_is_refused_with_its_length() -> None:
    check_tables(model_of("mpt"), configs.POSITIONS)
    check_tables(model_of("bloom"), 100_000)
    with pytest.raises(ValueError, match=r"MptForCausalLM .* sequence_length=257: .* at most 256$"):
        check_tables(model_of("mpt"), configs.POSITIONS + 1)


def test_what_is_added_is_the_columns_number_less_that_of_the_tokens_own() -> None:
    table = torch.randn(3, 20)
    positions = torch.tensor([[4, 5], [19, 19], [-1, -1]], dtype=torch.int32)
    added = added_bias(table, positions, 2, 9)
    for row, token in ((0, 0), (0, 1), (1, 0)):
        own = table[:, positions[row, token]]
        assert torch.equal(added[row, :, token], table[:, 2:9] - own[:, None])
    assert added.isfinite().all()


class Noted:
    """A backend that notes its call."""

    def attend(self, call: AttentionCall) -> Tensor:
        self.call = call
        return torch.zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])


HEADS, TOKENS, COLUMNS, DIM = 4, 3, 10, 16


def stand_ins(kv_heads: int = HEADS) -> tuple[Noted, Any, Any, Any, BiasMask]:
    backend = Noted()
    query = torch.randn(1, HEADS, TOKENS, DIM)
    keys, values = ScoreKeys(backend, COLUMNS).store(5, *(torch.randn(1, kv_heads, TOKENS, DIM) for _ in range(2)))
    return backend, query, keys, values, BiasMask(CausalMask(None), torch.float32)


def test_products_scaling_bias_mask_and_softmax_become_a_call_of_attention() -> None:
    backend, query, keys, values, mask = stand_ins()
    table = torch.randn(1, HEADS, 1, COLUMNS)
    weights = (((query @ keys.transpose(-1, -2) + table) * 0.5) / 2 + mask).softmax(dim=-1)
    assert (weights @ values).shape == (1, HEADS, TOKENS, DIM)
    assert backend.call.layer_idx == 5 and backend.call.scaling == 0.25 and backend.call.sliding_window is None
    assert backend.call.column_bias is not None
    assert torch.equal(backend.call.column_bias, table[0, :, 0] * 0.25)
    # As bloom writes it.
    folded = [each.view(HEADS, -1, DIM) for each in (keys, values)]
    flat = table[0].baddbmm(batch1=query[0], batch2=folded[0].transpose(1, 2), beta=3.0, alpha=0.125)
    weights = torch.softmax(flat.view(1, HEADS, TOKENS, COLUMNS) + mask, dim=-1, dtype=torch.float32)
    found = torch.bmm(torch.nn.functional.dropout(weights, 0.1, False).view(HEADS, TOKENS, -1), folded[1])
    assert found.shape == (HEADS, TOKENS, DIM)
    assert backend.call.scaling == 0.125 and torch.equal(backend.call.column_bias, table[0, :, 0] * 3)


def test_a_bias_in_the_mask_counts_once() -> None:
    backend, query, keys, values, mask = stand_ins()
    table = torch.randn(1, HEADS, 1, COLUMNS)
    carrying = torch.masked_fill(table, mask < -1, -1e9)
    for scores in (query @ keys.transpose(2, 3), query @ keys.transpose(2, 3) + table):
        _ = (scores + carrying).softmax(-1) @ values
        assert backend.call.column_bias is not None and torch.equal(backend.call.column_bias, table[0, :, 0])


REFUSED: dict[str, tuple[str, Callable[[Any, Any, Any, BiasMask], Any]]] = {
    "by token": ("adds Tensor", lambda q, k, v, m: q @ k.transpose(2, 3) + torch.zeros(1, HEADS, TOKENS, COLUMNS)),
    "of one head": ("adds Tensor", lambda q, k, v, m: q @ k.transpose(2, 3) + torch.zeros(1, 1, 1, COLUMNS)),
    "two": ("adds Tensor", lambda q, k, v, m: q @ k.transpose(2, 3) + torch.zeros(1, HEADS, 1, COLUMNS) + torch.zeros(1, HEADS, 1, COLUMNS)),
    "short": ("has no bias for more than 9 tokens", lambda q, k, v, m: q @ k.transpose(2, 3) + torch.zeros(1, HEADS, 1, 9)),
    "factor": ("multiplies scores by Tensor", lambda q, k, v, m: (q @ k.transpose(2, 3)) * torch.ones(())),
    "after the mask": ("multiplies scores", lambda q, k, v, m: (q @ k.transpose(2, 3) + m) * 2),
    "no mask": ("without a mask", lambda q, k, v, m: (q @ k.transpose(2, 3)).softmax(-1)),
    "tokens": ("over dimension 2", lambda q, k, v, m: (q @ k.transpose(2, 3) + m).softmax(2)),
    "no softmax": ("without a softmax", lambda q, k, v, m: (q @ k.transpose(2, 3) + m) @ v),
    "tanh": ("calls tanh", lambda q, k, v, m: torch.tanh(q @ k.transpose(2, 3))),
    "turned": ("exchanges the dimensions", lambda q, k, v, m: k.transpose(1, 2)),
    "viewed": ("views", lambda q, k, v, m: k.view(1, -1)),
    "read": ("reads .mean", lambda q, k, v, m: k.mean()),
    "dropout": ("calls dropout", lambda q, k, v, m: torch.dropout((q @ k.transpose(2, 3) + m).softmax(-1), 0.1, train=True)),
    "keys": ("calls matmul", lambda q, k, v, m: q @ k),
    "mask": ("computes with its attention mask", lambda q, k, v, m: m + torch.zeros(1)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_attention_with_a_bias_by_column_is_refused_by_name(case: str) -> None:
    reason, compute = REFUSED[case]
    _, *inputs = stand_ins()
    with pytest.raises(UnsupportedModelError, match=reason):
        compute(*inputs)


def test_a_bias_that_follows_from_what_is_in_the_text_is_found_by_the_comparison() -> None:
    model: Any = model_of("bloom")
    build = model.transformer.build_alibi_tensor

    def of_text(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        first = model.transformer.word_embeddings.weight[seen[-1]].mean()
        return build(mask, heads, dtype) * (1 + first)

    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["input_ids"][0, 0])), with_kwargs=True
    )
    model.transformer.build_alibi_tensor = of_text
    try:
        with pytest.raises(ValueError, match=r"BloomForCausalLM cannot be exported: .*logits differ"):
            inspect_model(model)
    finally:
        del model.transformer.build_alibi_tensor
        hook.remove()
    assert len(inspect_model(model).states) == configs.LAYERS
