# SPDX-License-Identifier: Apache-2.0
"""Programs of which a few layers were traced are those of which all were; what layers do apart from each other is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TINY_SIZES
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from optimum_neuron.config import NeuronConfig
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.program import export_graph, export_layers_once
from optimum_neuron.step.serving import IndexUsedError, WatchedIndex, plain_index
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.cpu.ops import OPS


LAYERS = 7
CONFIG = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="float32", target="cpu")


@pytest.fixture
def model() -> Any:
    config = LlamaConfig(**TINY_SIZES | {"num_hidden_layers": LAYERS})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return made.eval().requires_grad_(False)


def layers_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Traces all layers and a few, and compares the plans; returns the layers whose code ran in the second."""
    cache = KVCache(state_specs(CONFIG, look_at(model)))
    numbers = {id(layer.mlp): number for number, layer in enumerate(model.model.layers)}
    own, ran = LlamaMLP.forward, []

    def noted(self: LlamaMLP, x: Tensor) -> Tensor:
        ran.append(numbers[id(self)])
        return own(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", noted)
    graph = next(graph for graph in graph_specs(CONFIG) if graph.kind == "token_generation")
    whole, constants = lower(export_graph(model, cache, graph, OPS))
    ran.clear()
    found, own_constants = lower(export_layers_once(model, cache, graph, OPS))
    assert found == whole
    assert own_constants.keys() == constants.keys()
    assert all(torch.equal(own_constants[name], constants[name]) for name in constants)
    return ran


def change_layers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Tensor], Tensor]) -> None:
    own = LlamaDecoderLayer.forward

    def changed(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return change(self, own(self, hidden_states, *args, **kwargs))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", changed)


def test_three_of_the_same_layers_are_traced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers_run(model, monkeypatch) == [0, 1, 2]
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(LAYERS))


@pytest.mark.parametrize(
    "what", ["attribute", "shape", *(pytest.param(each, marks=pytest.mark.full) for each in ("type", "hook", "tied"))]
)
def test_a_layer_that_is_another_is_traced(what: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model.model.layers[5]
    if what == "attribute":
        layer.input_layernorm.variance_epsilon = 0.5
    elif what == "type":
        layer.input_layernorm = nn.LayerNorm(TINY_SIZES["hidden_size"]).requires_grad_(False)
    elif what == "shape":
        sizes = {"bias": False, "dtype": torch.float32}
        layer.mlp.up_proj = nn.Linear(TINY_SIZES["hidden_size"], 32, **sizes).requires_grad_(False)
        layer.mlp.gate_proj = nn.Linear(TINY_SIZES["hidden_size"], 32, **sizes).requires_grad_(False)
        layer.mlp.down_proj = nn.Linear(32, TINY_SIZES["hidden_size"], **sizes).requires_grad_(False)
    elif what == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: output * 2)
    else:
        layer.mlp.up_proj.weight = model.model.layers[6].mlp.up_proj.weight
    assert layers_run(model, monkeypatch) == ([0, 1, 2, 5, 6] if what == "tied" else [0, 1, 2, 5])


@pytest.mark.parametrize("caught", [False, True])
def test_a_layer_whose_code_computes_with_its_number_is_traced(
    caught: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(layer: Any, x: Tensor) -> Tensor:
        try:
            return x * 2 if layer.self_attn.layer_idx >= 5 else x
        except Exception:
            if caught:
                return x
            raise

    change_layers(monkeypatch, change)
    assert layers_run(model, monkeypatch)[-LAYERS:] == list(range(LAYERS))


def test_what_a_layer_hands_to_others_apart_from_its_result_is_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    norm = model.model.norm.forward

    def change(layer: Any, x: Tensor) -> Tensor:
        seen.append(x.relu())
        return x

    def summed(x: Tensor) -> Tensor:
        total = sum(seen, x)
        seen.clear()
        return norm(total)

    change_layers(monkeypatch, change)
    model.model.norm.forward = summed
    assert layers_run(model, monkeypatch)[-LAYERS:] == list(range(LAYERS))


def test_layers_that_are_given_something_of_their_own_are_traced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaDecoderLayer.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = next(number for number, layer in enumerate(model.model.layers) if layer is self)
        return own(self, *args, **kwargs, strength=float(number == 5))

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", called)
    assert layers_run(model, monkeypatch) == [0, 1, 2, 5, 6]


def test_what_fails_in_a_model_without_repeated_layers_is_traced_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del model.model.layers[3:]
    cache = KVCache(state_specs(CONFIG, look_at(model)))
    ran = []

    def failing(layer: Any, x: Tensor) -> Tensor:
        ran.append(layer.self_attn.layer_idx)
        raise RuntimeError("of the layer's own")

    change_layers(monkeypatch, failing)
    with pytest.raises(RuntimeError, match="of the layer's own"):
        export_layers_once(model, cache, graph_specs(CONFIG)[0], OPS)
    assert ran == [0]


def test_layers_that_run_twice_are_traced(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaDecoderLayer.__call__

    def called(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = own(self, hidden_states, *args, **kwargs)
        again = self is model.model.layers[-1]
        return own(self, hidden_states, *args, **kwargs) if again else hidden_states

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", called)
    assert layers_run(model, monkeypatch)[-LAYERS - 1 :] == [*range(LAYERS), LAYERS - 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda index: [0, 1, 2][index],
        lambda index: index + 1,
        lambda index: 2.5 * index,
        lambda index: index % 2,
        lambda index: index == 1,
        lambda index: index < 3,
        lambda index: bool(index),
        lambda index: {1: 2}.get(index),
        lambda index: f"{index}",
        lambda index: range(index),
        lambda index: index.bit_length(),
    ],
)
def test_a_watched_number_tells_of_each_use(use: Callable[[Any], Any]) -> None:
    index = WatchedIndex(1)
    assert isinstance(index, int) and index is not None and plain_index(index) == 1 and not index.used
    with pytest.raises(IndexUsedError):
        use(index)
    assert index.used


def test_a_layer_that_reads_the_state_of_one_that_is_left_out_is_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is of a kind of its own, and asks for the keys of the one before it, if there are any."""
    model.model.layers[-1].input_layernorm.variance_epsilon = 0.5
    caches: list[KVCache] = []
    made = KVCache.__init__

    def noted(self: KVCache, *args: Any) -> None:
        made(self, *args)
        caches.append(self)

    def change(layer: Any, x: Tensor) -> Tensor:
        last = layer is model.model.layers[-1]
        keys = getattr(caches[-1], f"key_{LAYERS - 2}", None) if last and caches else None
        return x if keys is None else x + keys.float().sum()

    monkeypatch.setattr(KVCache, "__init__", noted)
    change_layers(monkeypatch, change)
    layers_run(model, monkeypatch)
