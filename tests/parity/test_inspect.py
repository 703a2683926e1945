# SPDX-License-Identifier: Apache-2.0
"""An inspection costs no pass over the weights, and finds rules of a model's own that number positions."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from architectures import configs
from helpers import as_tensor, decode_rows, eager_runner, prefill_pieces, random_tokens, tiny_config
from sharp import sharpen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from optimum_neuron.checkpoints.quantize.quantize import quantize
from optimum_neuron.config import NeuronConfig
from optimum_neuron.parity.inspect import inspect_model, look_at
from optimum_neuron.parity.text_length import check_tables, check_text_length
from optimum_neuron.step import cache_needs as model_cache
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.codes import weight
from optimum_neuron.step.features.codes.weight import QuantizedWeight
from optimum_neuron.step.interface import ATTENTION_NAME, set_implementation


class Called(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])
def test_a_look_multiplies_no_weights(name: str, tiny_models: dict[str, Any], tiny_specs: dict[str, Any]) -> None:
    with Called() as called:
        spec = look_at(tiny_models[name])
    assert "embedding" in called.names and not called.names & {"mm", "addmm", "linear", "matmul"}
    assert spec == replace(tiny_specs[name], num_embeddings=spec.num_embeddings)
    with torch.inference_mode(), Called() as called:
        tiny_models[name].lm_head(torch.zeros(1, tiny_models[name].lm_head.in_features))
    assert called.names & {"mm", "addmm", "linear", "matmul"}


@pytest.mark.parametrize(("kind", "options"), [("int8", {}), ("int4", {"quantization_group_size": 32})])
def test_codes_are_dequantized_part_by_part_and_never_for_a_look(
    kind: str, options: dict[str, Any], tiny_models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_models["llama"])
    quantize(model, NeuronConfig(quantization=kind, **options))
    monkeypatch.setattr(weight, "_PART", 1)  # then a part is the least that it may be
    made: list[int] = []
    dequantize = QuantizedWeight.dequantize

    def record(part: QuantizedWeight) -> Tensor:
        made.append(part.outputs)
        return dequantize(part)

    monkeypatch.setattr(QuantizedWeight, "dequantize", record)
    look_at(model)
    assert made == []
    inspect_model(model)
    head: Any = model.get_output_embeddings()
    assert head.out_features > max(made) == weight._OUTPUTS
    x = torch.randn(3, head.in_features)
    assert torch.allclose(head(x), x @ dequantize(head.quantized_weight).t(), rtol=1e-5, atol=1e-6)


def test_a_few_rows_are_compared_by_one_thread(tiny_models: dict[str, Any]) -> None:
    counts: set[int] = set()
    hook = tiny_models["llama"].lm_head.register_forward_hook(lambda *_: counts.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inspect_model(tiny_models["llama"])
        assert counts == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        hook.remove()


# Of each kind, one that all runs try.
BEHIND_PADDING = (
    "roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
FROM_BEFORE = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
with_models = pytest.mark.parametrize(
    "name",
    ["roberta", "bart", *(pytest.param(name, marks=pytest.mark.full) for name in BEHIND_PADDING[1:] + FROM_BEFORE[1:])],
)  # fmt: skip
PROMPT = random_tokens(30) % (configs.VOCAB - 20) + 10


@cache
def model_of(name: str) -> PreTrainedModel:
    config = configs.tiny_config(name)
    config.pad_token_id = 3
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    sharpen(model)
    set_implementation(model, ATTENTION_NAME)
    return model


@torch.no_grad()
def own_logits(name: str, dtype: torch.dtype) -> Tensor:
    model = model_of(name).to(dtype)
    set_implementation(model, "eager")
    try:
        logits: Tensor = model(input_ids=torch.from_numpy(PROMPT)[None].long(), use_cache=False).logits[0, -1]
    finally:
        set_implementation(model, ATTENTION_NAME)
        model.float()
    return logits.double()


@with_models
def test_steps_number_positions_as_the_model_does(name: str) -> None:
    needs = CacheNeeds.read_code(model_of(name))
    assert needs.first_position == (4 if name in BEHIND_PADDING else 0) and needs.numbers == (name in FROM_BEFORE)
    runner = eager_runner(model_of(name), tiny_config())
    found = prefill_pieces(runner, 1, PROMPT, [8, 8, 8, 6])
    exact, own = (own_logits(name, dtype) for dtype in (torch.float64, torch.float32))
    assert (found - exact).abs().max() <= max(2 * float((own - exact).abs().max()), 1e-5)
    prefill_pieces(runner, 0, PROMPT[:-1], [3, 8, 1, 7, 2, 8])
    output = runner.run_step([], decode_rows(runner, {0: int(PROMPT[-1])}))
    assert output.decode_logits is not None
    torch.testing.assert_close(as_tensor(output.decode_logits[0]), found, rtol=1e-4, atol=1e-4)
    assert torch.equal(prefill_pieces(runner, 2, PROMPT, [1, 8, 8, 8, 5]), found)


@pytest.mark.parametrize(
    ("name", "rule", "value", "reason"),
    [
        ("roberta", "_first_position", 0, "does not number positions 0, 1, 2"),
        ("bart", "_numbers_tokens", False, "ignores position_ids and counts the tokens of a call"),
    ],
)
def test_positions_that_no_rule_explains_are_refused(
    name: str, rule: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, rule, lambda model: value)
    with pytest.raises(ValueError, match=f"cannot be exported: .*{reason}"):
        inspect_model(model_of(name))


@pytest.mark.parametrize(("name", "longest"), [("roberta", configs.POSITIONS - 4), ("bart", configs.POSITIONS)])
def test_a_text_is_as_long_as_its_table_of_positions(name: str, longest: int) -> None:
    model = model_of(name)
    check_tables(model, longest)
    check_text_length(model, longest)
    words = rf"be exported with sequence_length={longest + 1}: .* ends at {longest} tokens; .* at most {longest}$"
    with pytest.raises(ValueError, match=words):
        check_tables(model, longest + 1)
