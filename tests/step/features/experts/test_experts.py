# SPDX-License-Identifier: Apache-2.0
"""Models with experts: transformers' tokens on every target, and results that depend on a request's own tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import configs
from expert_layers import one_by_one
from helpers import CHUNK_SIZE, export_tiny, load_model, mixed_spec, random_tokens, step_inputs, tiny_config
from moe import CONFIGS, make_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.kernels.steps.steps import Experts
from optimum_neuron.parity.inspect import check_fixed_shapes, inspect_model
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.features.codes.modules import is_experts
from optimum_neuron.step.features.experts.experts import ExpertsCall, active_experts, dense_experts
from optimum_neuron.step.ops import DEFAULT_OPS, EAGER_OPS
from optimum_neuron.step.program import export_graph
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule
from optimum_neuron.targets.cpu.compiler import use_natural_layout
from optimum_neuron.targets.cpu.ops import OPS


Make = Callable[[str], Path]
# Mixtral's router is simpler than Qwen3-MoE's.
with_models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "mixtral" else name for name in CONFIGS]
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def mixtral(checkpoint: Make) -> Any:
    return load_model(checkpoint("mixtral"))


@pytest.fixture
def layer(mixtral: Any) -> Any:
    return next(module for module in mixtral.modules() if is_experts(module))


@with_models
def test_padding_is_routed_nowhere(name: str, checkpoint: Make) -> None:
    model, config = load_model(checkpoint(name)), tiny_config()
    cache = KVCache(state_specs(config, inspect_model(model)))
    calls: list[ExpertsCall] = []

    def note(call: ExpertsCall) -> Tensor:
        calls.append(call)
        return active_experts(call)

    spec = mixed_spec(config)
    step = StepModule(model, cache, spec, replace(EAGER_OPS, experts=note))
    with torch.no_grad():
        step(*step_inputs(spec, {1: (4, 7)}, {2: (0, random_tokens(3))}))
    assert calls
    # Decode row 1 of 3, and 3 tokens of the first chunk row; the second is idle.
    actual = torch.zeros(3 + 2 * CHUNK_SIZE, dtype=torch.bool)
    actual[[1, 3, 4, 5]] = True
    for call in calls:
        assert (call.index[actual] < call.experts).all() and (call.index[~actual] == call.experts).all()
        for experts in (active_experts, dense_experts):
            output = experts(call)
            assert output[actual].any(1).all() and not output[~actual].any()


@with_models
def test_formulations_agree(name: str, checkpoint: Make) -> None:
    model = load_model(checkpoint(name))
    layers = [module for module in model.modules() if is_experts(module)]
    hidden_states, weights = torch.randn(9, 64), torch.rand(9, 2)
    experts = layers[0].gate_up_proj.shape[0]
    index = torch.randint(0, experts + 1, (9, 2))
    call = ExpertsCall(layers[0], hidden_states, index, weights)
    without = one_by_one(call)
    for norm in (False, True):  # which follows each expert
        layers[0].has_post_expert_norm, layers[0].post_expert_norm = norm, nn.RMSNorm(64, elementwise_affine=False)
        exact = one_by_one(call)
        assert ((exact - without).abs().max() > 0.1) == norm
        for formulation in (active_experts, dense_experts):
            assert (formulation(call).double() - exact).abs().max() < 1e-5
    use_natural_layout(model)
    assert (active_experts(call).double() - exact).abs().max() < 1e-5


def test_an_expert_that_overflows_on_the_tokens_of_others_does_no_harm(layer: Any) -> None:
    layer.down_proj.data[1] = torch.finfo(torch.float32).max
    call = ExpertsCall(layer, torch.randn(3, 64), torch.tensor([[0, 2], [3, 2], [0, 4]]), torch.rand(3, 2))
    assert not dense_experts(replace(call, index=torch.ones_like(call.index))).isfinite().all()
    assert (dense_experts(call).double() - one_by_one(call)).abs().max() < 1e-5


def test_tokens_that_are_not_finite_reach_no_other(layer: Any) -> None:
    call = ExpertsCall(layer, torch.randn(4, 64), torch.tensor([[0, 2], [0, 3], [4, 4], [3, 0]]), torch.rand(4, 2))
    broken = replace(call, hidden_states=call.hidden_states.clone(), weights=call.weights.clone())
    broken.hidden_states[[1, 2]], broken.weights[[1, 2]] = torch.nan, torch.nan  # row 2 is padding
    with torch.no_grad():
        for formulation in (active_experts, dense_experts):
            found = formulation(broken)
            assert torch.equal(found[[0, 3]], formulation(call)[[0, 3]]) and found[1].isnan().all()


@with_models
def test_no_shape_of_a_graph_depends_on_the_routing(name: str, checkpoint: Make) -> None:
    model, config = load_model(checkpoint(name)), tiny_config()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_fixed_shapes(model, "cpu")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    cache = KVCache(state_specs(config, inspect_model(model)))
    program = export_graph(model, cache, graph_specs(config)[0], DEFAULT_OPS)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, Tensor) or all(type(size) is int for size in value.shape)
        assert "nonzero" not in str(node.target) and "_local_scalar" not in str(node.target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@with_models
def test_no_linear_layer_of_a_cpu_graph_is_left_to_torch(name: str, dtype: str, checkpoint: Make) -> None:
    model = Checkpoint(checkpoint(name), None, name, trust_remote_code=False).load_model(dtype)
    config = tiny_config(dtype=dtype)
    cache = KVCache(state_specs(config, inspect_model(model)))
    use_natural_layout(model)
    plan, _ = lower(export_graph(model, cache, graph_specs(config)[0], OPS))
    assert sum(isinstance(step, Experts) for step in plan.steps) == 2 * sum(map(is_experts, model.modules()))


def test_experts_that_compute_something_else_than_their_own_code_are_refused(
    mixtral: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_model(mixtral)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="MixtralForCausalLM cannot be exported"):
        patch.setattr(type(layer), "_apply_gate", lambda self, up: up.chunk(2, dim=-1)[1])
        inspect_model(mixtral)
    forward = type(layer).forward
    monkeypatch.setattr(
        type(layer), "forward", lambda self, *args: forward(self, *(each.repeat(2, 1) for each in args))[::2]
    )
    with pytest.raises(ValueError, match=r"its experts get 8 rows of hidden states in a step of 4 tokens"):
        inspect_model(mixtral)


def test_shapes_that_follow_the_routing_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    own_code, output = tmp_path / "dbrx", tmp_path / "out" / "artifact"  # its experts loop over those in use
    model = AutoModelForCausalLM.from_config(configs.tiny_config("dbrx"), dtype=torch.float32)
    model.save_pretrained(own_code)
    with pytest.raises(
        ValueError,
        match=r"DbrxForCausalLM cannot be exported for target='cpu': what transformer\.blocks\.0\.ffn\.experts computes "
        r"depends on the values of tensors .*nonzero.*; target='eager' runs it",
    ):
        export_tiny(own_code, output, target="cpu")
    assert not output.parent.exists()
    export_tiny(own_code, output, target="eager")


def test_an_artifact_without_the_kernels_layout_still_loads(checkpoint: Make) -> None:
    """Those of earlier versions hold transposed weights as transformers has them."""
    model, stored = load_model(checkpoint("gpt_oss")), load_model(checkpoint("gpt_oss"))
    tensors = {f"model.{name}": tensor for name, tensor in stored.named_parameters()}
    use_natural_layout(model, tensors)
    layers = [module for module in model.modules() if is_experts(module)]
    assert layers and all(layer.is_transposed for layer in layers)
    use_natural_layout(stored)
    use_natural_layout(model, {f"model.{name}": tensor for name, tensor in stored.named_parameters()})
    assert not any(layer.is_transposed for layer in layers)
    assert all(map(torch.equal, model.parameters(), stored.parameters()))
