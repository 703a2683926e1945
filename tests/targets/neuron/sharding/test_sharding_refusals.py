# SPDX-License-Identifier: Apache-2.0
"""Models that ranks cannot share exactly are refused, with the layer and the reason; what cannot be cut stays whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from biased import model_of
from quantized import quantize_mixed, values_of
from recurrent import model as recurrent
from selecting import CONFIGS
from sharded_ranks import make_model
from tiny import TINY_SIZES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoConfig, AutoModelForCausalLM, BitNetConfig, GPT2Config, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.checkpoints.quantize.quantize import quantize
from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.features.codes.modules import QuantizedLinear
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.targets.neuron.sharding import shard_plan


def styled(name: str, **styles: str) -> PreTrainedModel:
    """A case's model with changes to its plan: names have underscores for dots, an empty style takes a layer out."""
    model = make_model(name)
    for layer, style in styles.items():
        model.tp_plan.pop(f"model.layers.*.{layer.replace('__', '.')}")
        if style:
            model.tp_plan[f"model.layers.*.{layer.replace('__', '.')}"] = style
    return model


def changed(name: str, module: str, replacement: nn.Module) -> PreTrainedModel:
    model = make_model(name)
    parent, _, child = module.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
    return model


def from_config(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def quantized(**options: Any) -> PreTrainedModel:
    model = from_config(LlamaConfig(**TINY_SIZES))
    quantize(model, NeuronConfig.from_dict({"quantization": "int4", **options}))
    return model


class Computed(nn.Module):
    """Modules, and a function of them and of inputs."""

    def __init__(self, compute: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(*inputs, **self._modules)


def unshared(**styles: str) -> PreTrainedModel:
    """A model whose layers with recurrences no ranks can share."""
    model: Any = styled("qwen3_next", **styles)
    layer = model.model.layers[0].linear_attn
    # The first heads get what the last ones compute: a rank's places depend on the state of another's heads.
    layer.norm = Computed(lambda x, gate, norm: norm(x.flip(0), gate.flip(0)), norm=layer.norm)
    return model


class NormPerHead(nn.ModuleList):
    """One module per head, as many as there are heads to run it on: it would give each rank the first ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([norm(part) for norm, part in zip(self, x.unbind(-2), strict=False)], dim=-2)


def divide_by_mean(x: Tensor) -> Tensor:
    """No shape shows that it needs all values of a token."""
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class ValuesFirst(nn.Module):
    """Attention whose fused projection gives values before keys and queries, and which has no rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0
        self.qkv_proj, self.o_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        heads = self.qkv_proj(hidden_states).unflatten(-1, (-1, 16)).transpose(1, 2)
        value, key, query = heads.split([2, 2, 4], dim=1)
        attend = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
        output, _ = attend(self, query, key, value, None, attention_backend=kwargs["attention_backend"])
        return self.o_proj(output.flatten(2)), None


def with_own_parameter() -> PreTrainedModel:
    model: Any = make_model("mixtral")
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(4))
    return model


def selecting() -> PreTrainedModel:
    config = AutoConfig.for_model("minimax_m3_vl_text", **CONFIGS["minimax_m3_vl_text"])
    with torch.device("meta"):
        return from_config(config)


ATTENTION, MLP, MAMBA = "model.layers.0.self_attn", "model.layers.1.mlp", "model.layers.0.mamba"
NORM = f"{ATTENTION}.q_norm"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: from_config(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100)),
            r"gpt2 cannot be shared by tensor_parallel_size=2 ranks: it declares no plan \(base_model_tp_plan\), and the "
            r"layers of transformer.h.0.attn are not one projection .*; use tensor_parallel_size=1",
        ),
        (lambda: from_config(BitNetConfig(**TINY_SIZES)), "no plan .*, and .*0.mlp.gate_proj is neither attention nor"),
        (lambda: styled("llama", mlp__down_proj="sequence_parallel"), "style sequence_parallel, for which there is no"),
        (lambda: styled("llama", mlp__down_proj=""), "its code does not run on a rank's part of it: .*48"),
        (lambda: styled("qwen3", self_attn__q_norm="colwise"), "colwise, and is a Qwen3RMSNorm instead of a plain"),
        (lambda: styled("llama4", feed_forward__experts=""), "gate_up_proj is cut, and 0 modules of its plan sum its"),
        (lambda: changed("llama", f"{ATTENTION}.o_proj", nn.Linear(60, 64)), "cannot be followed without data: .*60"),
        (lambda: changed("llama", f"{ATTENTION}.q_proj", nn.Sequential(nn.Linear(64, 64))), "and is a Sequential"),
        (lambda: changed("qwen3", NORM, NormPerHead(nn.LayerNorm(16) for _ in range(4))), "q_norm.2 runs 0 times instead of 1"),
        (
            lambda: changed("llama", f"{MLP}.act_fn", Computed(divide_by_mean)),
            r"its code mixes values of several ranks: .*layers.1.mlp.act_fn', name='mean', sizes=\(96,\)\) becomes .*48",
        ),
        (lambda: recurrent("selective"), f"the heads of {MAMBA}, which keeps .*, cannot be cut, and it declares no plan"),
        (lambda: unshared(linear_attn__out_proj="rowwise"), "its plan cuts .*0.linear_attn.out_proj in a layer with"),
        (lambda: changed("llama", "lm_head", nn.Sequential(nn.Linear(64, 300))), "vocabulary is not one embedding"),
        (lambda: changed("phi3", ATTENTION, ValuesFirst()), "qkv_proj has 128 outputs, which are not those of 4 query"),
        (with_own_parameter, "experts has a parameter scale, which transformers' experts do not have"),
        (selecting, "its layers select keys for each of 2 heads, and ranks have no parts of a selection"),
        (lambda: model_of("bloom"), "it attends in code of its own, .*; use tensor_parallel_size=1"),
        (quantized, "down_proj.weight is quantized in groups of 32 inputs, and a rank's 48 are no whole groups; use"),
    ],
)  # fmt: skip
def test_a_model_that_ranks_cannot_share_exactly_is_refused(make: Callable[[], PreTrainedModel], reason: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=reason):
        shard_plan(model, 2)


def test_one_rank_needs_no_plan() -> None:
    with pytest.raises(ValueError, match="world_size=1 shares nothing"):
        shard_plan(make_model("llama"), 1)


def test_a_recurrence_whose_heads_are_mixed_or_do_not_divide_is_whole_on_every_rank() -> None:
    weight = "model.model.layers.0.linear_attn.in_proj_qkvz.weight"
    shared, whole = shard_plan(make_model("qwen3_next"), 2), shard_plan(unshared(), 2)
    assert shared.local_shape(weight) == (64, 64) and [*shared.recurrences] == ["model.layers.0.linear_attn"]
    assert weight in whole.whole and not whole.recurrences
    assert [*whole.attention] == [*shared.attention]
    undivided = shard_plan(make_model("qwen3_next"), 3)
    assert not undivided.recurrences and undivided.attention


def fail_on_numbers(x: Tensor, gate: Tensor) -> Tensor:
    if not isinstance(x, FakeTensor):
        raise TypeError("no numbers")
    return x * gate


def test_why_a_layer_with_a_recurrence_stays_whole_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = changed("qwen3_next", "model.layers.0.linear_attn.norm", Computed(fail_on_numbers))
    with caplog.at_level(logging.DEBUG, "optimum_neuron"):
        assert not shard_plan(model, 2).recurrences
    assert "model.layers.0.linear_attn stays whole on every rank (TypeError: no numbers)" in caplog.text


def test_what_all_heads_use_is_whole_and_a_group_is_held_by_each_rank_of_its_heads() -> None:
    plan = shard_plan(make_model("nemotron_h"), 4)  # two groups
    layer = "model.layers.0.mixer"
    shared = plan.recurrences[layer]
    assert [shared.heads_of(1), shared.key_heads_of(1), shared.key_heads_of(2)] == [[2, 3], [0], [1]]
    # Values, then keys and queries of both groups, of 8 numbers each.
    values, groups = range(32, 64), (range(128, 136), range(144, 152))
    assert plan.channels(layer, 0, 1) == (*values, *groups[0], *groups[1])
    assert [*plan.whole_inputs] == [f"{layer}.norm"]  # of a group, whose values two ranks have
    assert not shard_plan(make_model("nemotron_h"), 2).whole_inputs
    low_rank = {f"model.model.layers.0.self_attn.{each}.weight" for each in ("forget_gate.f_a_proj", "g_a_proj")}
    assert low_rank < shard_plan(make_model("kimi_linear"), 4).whole


def feed_forward(join: Callable[[Tensor, Tensor], Tensor]) -> PreTrainedModel:
    """A model without a plan, with a layer that joins both halves of its first product for its last one."""

    def compute(x: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
        return outer(join(*inner(x).chunk(2, -1)))

    layer = Computed(compute, inner=nn.Linear(64, 192), outer=nn.Linear(96, 64))
    return changed("lfm2", "model.layers.0.feed_forward", layer)


def test_without_a_plan_a_block_is_cut_where_its_parts_add_up_to_it() -> None:
    name = "model.layers.0.feed_forward"
    plan = shard_plan(feed_forward(lambda one, other: one.sigmoid() * other), 2)
    assert plan.local_shape(f"model.{name}.inner.weight") == (96, 64)
    assert plan.local_shape(f"model.{name}.outer.weight") == (64, 48)
    for join in (
        lambda one, other: torch.cat([one[..., ::2] * one[..., 1::2], other[..., ::2] * other[..., 1::2]], -1),
        lambda one, other: one * other.flip(-1),
        lambda one, other: one * other.softmax(-1),
        lambda one, other: one + 1e-2 * (one.sum(-1, keepdim=True) + other.sum(-1, keepdim=True)),
        lambda one, other: one * other + other.new_zeros(96),  # counts on the whole
    ):
        told = f"{name}.inner is neither attention nor experts nor part of a block with"
        with pytest.raises(ValueError, match=told):
            shard_plan(feed_forward(join), 2)
    # What mixes places within the halves of two ranks is seen with four.
    quarters = feed_forward(lambda one, other: one * other.unflatten(-1, (-1, 48)).flip(-1).flatten(-2))
    assert f"model.{name}.inner.weight" in shard_plan(quarters, 2).rules
    with pytest.raises(ValueError, match="with parts that add up to it"):
        shard_plan(quarters, 4)


def join_in_turns(x: Tensor, gate_up_proj: nn.Module, down_proj: nn.Module) -> Tensor:
    """Gate and up from one projection in turns, which cannot be cut as two halves."""
    packed = gate_up_proj(x)
    return down_proj(nn.functional.silu(packed[..., ::2]) * packed[..., 1::2])


def test_a_fused_projection_is_cut_in_halves_only_where_it_has_halves() -> None:
    fused = "model.model.layers.0.mlp.gate_up_proj.weight"
    assert fused in shard_plan(make_model("phi3"), 2).rules
    projections = {"gate_up_proj": nn.Linear(64, 192, bias=False), "down_proj": nn.Linear(96, 64, bias=False)}
    plan = shard_plan(changed("phi3", "model.layers.0.mlp", Computed(join_in_turns, **projections)), 2)
    assert fused in plan.shapes and fused not in plan.rules


def test_parts_of_codes_of_all_forms_stand_for_the_parts_of_the_weight() -> None:
    whole = from_config(LlamaConfig(**TINY_SIZES))
    quantize_mixed(whole, None)
    plan, tensors = shard_plan(whole, 2), named_tensors(whole)
    for name, module in whole.named_modules():
        if isinstance(module, QuantizedLinear):
            own = [f"model.{name}.{part}" for part in ("codes", "scale", "shift")]
            parts = [
                values_of(
                    module.kind, *(plan.shard(tensors[each], each, rank) if each in tensors else None for each in own)
                )
                for rank in range(2)
            ]
            of_inputs = name.endswith(("o_proj", "down_proj"))
            assert torch.equal(torch.cat(parts, int(of_inputs)), module.quantized_weight.dequantize()), name


def test_heads_that_share_a_group_stay_together() -> None:
    """Two heads of 16 inputs are a group of 32."""
    plan = shard_plan(quantized(quantization_exclude=["*.down_proj"]), 2)
    name = "model.model.layers.0.self_attn.o_proj"
    assert (plan.local_shape(f"{name}.codes"), plan.local_shape(f"{name}.scale")) == ((64, 16), (64, 1))
