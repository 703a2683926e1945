# SPDX-License-Identifier: Apache-2.0
"""Rounded weights are as near as their codes allow; on a text those of int4 are nearest where their inputs are large."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import folder_bytes, load_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.checkpoints.quantize import rounding
from optimum_neuron.checkpoints.quantize.calibration import input_importance
from optimum_neuron.checkpoints.quantize.rounding import round_fp8, round_int4, round_int8
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.first_use import export_command
from optimum_neuron.export.recipe import export_model
from optimum_neuron.step.features.codes.modules import is_experts
from optimum_neuron.step.features.codes.weight import UNUSED_SCALE_BITS, QuantizedWeight


ROUNDINGS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": round_int8, "fp8": round_fp8,
    "fp8 of Trainium 2": lambda weight: round_fp8(weight, 240.0),
    "int4": lambda weight: round_int4(weight, 32),
    "int4 with a zero point": lambda weight: round_int4(weight, 32, zero_point=True),
}  # fmt: skip


def _weight(seed: int, outputs: int = 5, inputs: int = 64) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 10**6), exponent=st.integers(-3, 3), outlier=st.floats(1, 20))
@settings(max_examples=30, deadline=None)
def test_values_are_off_by_half_a_step_or_clipped_if_better(seed: int, exponent: int, outlier: float) -> None:
    weight = _weight(seed) * 10.0**exponent
    weight[0, 3] *= outlier
    groups = weight.view(5, 2, 32)
    error = (round_int8(weight).dequantize() - weight).abs()
    assert (error <= weight.abs().amax(-1, keepdim=True) / 127 * 0.5001).all()
    error = (round_fp8(weight).dequantize() - weight).abs()
    assert (error <= (weight.abs() / 15.9).maximum(weight.abs().amax(-1, keepdim=True) / 448 / 2**9)).all()
    # The nearest of 15 steps across a group's span, without any search; of scales of 5 significant bits none may be as good for a group.
    for zero_point in (False, True):
        error = (round_int4(weight, 32, zero_point=zero_point).dequantize() - weight).view(5, 2, 32).square().sum(-1)
        step = groups.abs().amax(-1, keepdim=True) / 7
        plain = ((groups / step).round() * step - groups).square().sum(-1)
        assert ((error <= plain * 1.3 + 1e-12).all() and error.sum() <= plain.sum() + 1e-12) or zero_point
        span = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
        assert (error <= 32 * (span * 1.1) ** 2).all()


def test_codes_stay_within_what_a_device_and_a_scale_have() -> None:
    assert round_fp8(_weight(0), 240.0).codes.float().abs().amax() == 240
    for factor, size, words in ((1, 48, "groups of 48 do not divide 64 inputs"), (1e7, 32, "too large for int4")):
        with pytest.raises(ValueError, match=words):
            round_int4(_weight(0) * factor, size)


@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e-6, 1e-9, 8e4])
def test_scales_of_int4_times_codes_are_numbers_of_bfloat16(factor: float) -> None:
    for importance in (None, torch.rand(64) + 0.1):
        weight = round_int4(_weight(0, 50) * factor, 32, importance=importance)
        assert torch.equal(weight.dequantize().bfloat16().float(), weight.dequantize())
        assert not (weight.scale.view(torch.int16) & UNUSED_SCALE_BITS).any()
        assert weight.scale.any() == (factor > 1e-8)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_an_output_is_rounded_alike_beside_any_others_and_zeros_and_single_values_are_kept(name: str) -> None:
    weight = torch.cat([_weight(0), _weight(1) * 100])
    whole, part = (ROUNDINGS[name](each) for each in (weight, weight[2:4]))
    assert torch.equal(whole.dequantize()[2:4], part.dequantize())
    experts = ROUNDINGS[name](torch.stack([weight[:5], weight[5:]]))
    assert torch.equal(experts.dequantize().flatten(0, 1), whole.dequantize())
    weight = torch.zeros(3, 64)
    weight[1, 7] = -2.5
    weight[2, :] = 0.125
    found = ROUNDINGS[name](weight).dequantize()
    assert not found[0].any() and torch.count_nonzero(found[1]) == 1 and torch.allclose(found, weight, rtol=1e-3)


@pytest.mark.parametrize("name", [*ROUNDINGS, "int4 on a text"])
def test_threads_share_a_weight_and_change_no_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_text(weight: Tensor) -> QuantizedWeight:
        return round_int4(weight, 32, importance=torch.linspace(0.01, 1, 64) ** 4)

    weight, threads, round_weight = _weight(0, 40), torch.get_num_threads(), ROUNDINGS.get(name, on_text)
    whole = round_weight(weight)
    monkeypatch.setattr(rounding, "_PIECE", 3 * 32)  # an odd number of groups
    torch.set_num_threads(3)
    try:
        assert torch.equal(round_weight(weight).dequantize(), whole.dequantize()) and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


SIZES: dict[str, Any] = {"target": "eager", "sequence_length": 64, "dtype": "float32", "quantization": "int4"}
TEXT = "A text on which weights are rounded: some words, and then some more of them. " * 16
IDS = torch.randint(3, 259, (3, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _export(checkpoint: Path, output: Path, text: Path | None, **options: Any) -> Path:
    config = NeuronConfig(**{**SIZES, **options})
    return export_model(checkpoint, output, config=config, quantization_calibration=text)


def _inputs(count: int, seed: int) -> Tensor:
    """`[count, 64]` of few directions, four of them large: as a model's are on one text and on another."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, 12, generator=draw) @ torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    mixed[:, [3, 17, 40, 41]] *= 25
    return mixed


@pytest.mark.parametrize("zero_point", [False, True])
def test_outputs_on_other_inputs_are_nearer_and_each_expert_is_rounded_by_its_own(zero_point: bool) -> None:
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    seen, others = _inputs(400, seed=2), _inputs(400, seed=3)
    importances = (None, seen.square().mean(0), torch.full((64,), 2.0))
    plain, calibrated, alike = (
        round_int4(weight, 32, zero_point=zero_point, importance=each).dequantize() for each in importances
    )
    errors = [(others @ (each - weight).T).square().mean() for each in (calibrated, plain)]
    assert errors[0] < 0.6 * errors[1] and torch.equal(plain, alike)
    # Experts of so many groups that they are searched in several pieces, with ends in the middle of a row and of an expert.
    weight = torch.randn(3, 150, 320, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(3, 320, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3
    found = round_int4(weight, 32, zero_point=zero_point, importance=importance).dequantize()
    for expert in range(3):
        alone = round_int4(weight[expert], 32, zero_point=zero_point, importance=importance[expert])
        assert torch.equal(found[expert], alone.dequantize())


class _Products(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, list[Tensor]] = defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is nn.functional.linear:
            self.inputs[args[1].data_ptr()].append(args[0].flatten(0, -2))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_importance_of_inputs(name: str, sharp_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own model multiplies, whose experts are a product each."""
    monkeypatch.setattr("optimum_neuron.checkpoints.quantize.calibration._LEAST_TOKENS", 4)
    model = load_model(sharp_checkpoints[name])
    layers = {each: own for each, own in model.named_modules() if type(own) is nn.Linear or is_experts(own)}
    del layers["lm_head"]
    found = input_importance(model, layers, IDS)
    peer = AutoModelForCausalLM.from_pretrained(
        sharp_checkpoints[name], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), _Products() as products:
        for ids in IDS:
            peer(ids[None], use_cache=False)
    weights = {each: weight for each, weight in peer.named_parameters() if each in found}
    linear = {f"{each}.weight" for each, module in layers.items() if isinstance(module, nn.Linear)}
    assert found.keys() >= linear
    for each, weight in weights.items():
        of_each = found[each].view(-1, weight.shape[-1])
        for importance, own in zip(of_each, weight.view(-1, *weight.shape[-2:]), strict=True):
            taken = products.inputs[own.data_ptr()]
            if sum(map(len, taken)) >= 4:
                expected = torch.cat(taken).double().square().mean(0)
                expected = expected + 0.01 * expected.mean()
                assert torch.allclose(importance.double(), expected, rtol=1e-4), each


def test_threads_change_no_bit_and_the_model_stays_as_it_was(tiny_checkpoint: Path) -> None:
    model = load_model(tiny_checkpoint)
    layers = {name: module for name, module in model.model.named_modules() if type(module) is nn.Linear}
    attention, threads = model.config._attn_implementation, torch.get_num_threads()
    heads: list[object] = []
    used: set[int] = set()
    model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    model.model.norm.register_forward_hook(lambda *_: used.add(torch.get_num_threads()))
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(input_importance(model, layers, IDS))
    finally:
        torch.set_num_threads(threads)
    assert not heads and used == {1}  # the run ends before the head
    assert len(found[0]) == 14 and all(torch.equal(each, found[1][name]) for name, each in found[0].items())
    assert model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_artifact_is_of_the_text_alone_with_its_digest(tiny_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    first = _export(tiny_checkpoint, tmp_path / "first", text)
    shutil.copy(text, tmp_path / "copy")
    again = _export(tiny_checkpoint, tmp_path / "artifact", tmp_path / "copy")
    contents = [folder_bytes(each) for each in (first, again)]
    assert contents[0] == contents[1]
    described = [each for path, each in contents[0].items() if path.endswith(".json") and path != "neuron_config.json"]
    assert not any(b"a text" in each or str(tmp_path).encode() in each for each in described)
    artifact = Artifact.open(first)
    told = "--quantization-calibration " + artifact.manifest["origin"]["calibration"][:12]
    assert told in export_command(artifact.manifest, artifact.config, "out")
    plain = load_file(_export(tiny_checkpoint, tmp_path / "plain", None) / WEIGHTS_NAME)
    tensors = load_file(first / WEIGHTS_NAME)
    changed = {name.split(".")[-2] for name, each in tensors.items() if not torch.equal(each, plain[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_what_no_text_reaches_is_rounded_without_it_and_named(
    tiny_checkpoint: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("optimum_neuron.checkpoints.quantize.calibration._LEAST_TOKENS", 10**6)
    names = {"out": text, "plain": None}
    found, plain = (load_file(_export(tiny_checkpoint, tmp_path / name, names[name]) / WEIGHTS_NAME) for name in names)
    told = "14 weights, as model.layers.0.self_attn.q_proj.weight, met too few tokens of the calibration text"
    assert told in caplog.text and all(torch.equal(each, plain[name]) for name, each in found.items())


def test_inputs_that_are_no_numbers_are_refused(tiny_checkpoint: Path) -> None:
    model = load_model(tiny_checkpoint)
    table = model.model.embed_tokens.weight.detach().clone()
    table[IDS[0, 0]] = torch.inf
    model.model.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
    layers = {"model.layers.0.mlp.up_proj": model.model.layers[0].mlp.up_proj}
    with pytest.raises(ValueError, match=r"the inputs of model.layers.0.mlp.up_proj.weight are not finite"):
        input_importance(model, layers, IDS)


TEXTS: dict[str, tuple[bytes | None, type[Exception], str]] = {
    "nothing": (None, FileNotFoundError, "is not there; name a file of text"),
    "a folder": (None, FileNotFoundError, "is a folder; name a file of text"),
    "empty": (b" \n" * 999, ValueError, "is empty"),
    "no UTF-8": (TEXT.encode() + b"\xff\xfe", ValueError, f"is no text in UTF-8: byte {len(TEXT)} is 0xff"),
    "zeros": (b"text \0" * 999, ValueError, "is no text: byte 5 is 0"),
    "short": (b"short", ValueError, "has 5 tokens, and weights are rounded on 512 of them at least"),
    "long": (b"a" * ((16 << 20) + 1), ValueError, "has 16,777,217 bytes, .* 16,777,216 at most"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_of_no_use_is_refused_before_any_write(kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    data, error, told = TEXTS[kind]
    if kind == "a folder":
        (tmp_path / "text").mkdir()
    if data is not None:
        (tmp_path / "text").write_bytes(data)
    with pytest.raises(error, match=told):
        _export(tiny_checkpoint, tmp_path / "here" / "out", tmp_path / "text")
    assert not (tmp_path / "here").exists()


def test_a_text_needs_int4_and_the_checkpoint_s_tokenizer(tiny_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    for kind in (None, "int8", "checkpoint"):
        with pytest.raises(ValueError, match=f"and quantization={kind!r}; leave it out"):
            _export(tiny_checkpoint, tmp_path / "here" / "out", text, quantization=kind)
    bare = shutil.copytree(
        tiny_checkpoint, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"]
    )
    with pytest.raises(ValueError, match="has no tokenizer, and weights are to be rounded on a text"):
        _export(bare, tmp_path / "here" / "out", text)
    larger = AutoTokenizer.from_pretrained(tiny_checkpoint)
    larger.add_tokens([f"<{number}>" for number in range(60)])
    larger.save_pretrained(bare)
    text.write_text(TEXT + "<59>", encoding="utf-8")
    with pytest.raises(ValueError, match=r"its tokenizer makes the token 318 of .*, and the model has 300"):
        _export(bare, tmp_path / "here" / "out", text)
    assert not (tmp_path / "here").exists()
