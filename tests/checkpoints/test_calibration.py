# SPDX-License-Identifier: Apache-2.0
"""Weights of int4 that are rounded on a text are nearest where their inputs are large, and the same text gives the same bits."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import load_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.checkpoints.quantize.importance import input_importance
from optimum_neuron.checkpoints.quantize.rounding import round_int4
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.export_command import export_command
from optimum_neuron.export.recipe import export_model
from optimum_neuron.step.features.codes.expert_weights import is_experts


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
@pytest.mark.parametrize("group", [32, 64])
def test_outputs_on_other_inputs_are_nearer_than_without(group: int, zero_point: bool) -> None:
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    seen, others = _inputs(400, seed=2), _inputs(400, seed=3)
    plain, calibrated = (
        (others @ (round_int4(weight, group, zero_point=zero_point, importance=each).dequantize() - weight).T)
        for each in (None, seen.square().mean(0))
    )
    assert calibrated.square().mean() < 0.6 * plain.square().mean()


def test_importance_that_is_alike_changes_no_bit() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    plain, alike = (round_int4(weight, 32, importance=each) for each in (None, torch.full((64,), 2.0)))
    assert torch.equal(plain.codes, alike.codes) and torch.equal(plain.scale, alike.scale)


@pytest.mark.parametrize("zero_point", [False, True])
def test_each_expert_is_rounded_by_its_own_inputs(zero_point: bool) -> None:
    """Of so many groups that they are searched in several pieces, whose ends are in the middle of a row and of an expert."""
    weight = torch.randn(3, 150, 320, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(3, 320, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3
    found = round_int4(weight, 32, zero_point=zero_point, importance=importance).dequantize()
    for expert in range(3):
        alone = round_int4(weight[expert], 32, zero_point=zero_point, importance=importance[expert])
        assert torch.equal(found[expert], alone.dequantize())


class _Products(TorchFunctionMode):
    """Notes what linear products take, by the memory of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, list[Tensor]] = defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is nn.functional.linear:
            self.inputs[args[1].data_ptr()].append(args[0].flatten(0, -2))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_importance_is_the_mean_square_of_what_products_take(
    name: str, sharp_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' own model multiplies, whose experts are a product each."""
    monkeypatch.setattr("optimum_neuron.checkpoints.quantize.importance._LEAST_TOKENS", 4)
    model = load_model(sharp_checkpoints[name])
    layers = {
        each: module for each, module in model.named_modules() if type(module) is nn.Linear or is_experts(module)
    }
    del layers["lm_head"]
    found = input_importance(model, layers, IDS)
    peer = AutoModelForCausalLM.from_pretrained(
        sharp_checkpoints[name], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), _Products() as products:
        for ids in IDS:
            peer(ids[None], use_cache=False)
    weights = {each: weight for each, weight in peer.named_parameters() if each in found}
    assert {each.rpartition(".")[0] or each for each in found} >= {
        each for each, module in layers.items() if isinstance(module, nn.Linear)
    }
    for each, weight in weights.items():
        for importance, own in zip(
            found[each].view(-1, weight.shape[-1]), weight.view(-1, *weight.shape[-2:]), strict=True
        ):
            taken = products.inputs[own.data_ptr()]
            if sum(map(len, taken)) < 4:
                continue
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
    norm = model.model.norm.register_forward_hook(lambda *_: used.add(torch.get_num_threads()))
    with norm:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            try:
                found.append(input_importance(model, layers, IDS))
            finally:
                torch.set_num_threads(threads)
    assert not heads and used == {1}  # the run ends before the head
    assert len(found[0]) == 14 and all(torch.equal(each, found[1][name]) for name, each in found[0].items())
    assert model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_artifact_is_of_the_text_alone_and_tells_its_digest(
    tiny_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    """Nothing of the artifact says where the text was."""
    first = _export(tiny_checkpoint, tmp_path / "first", text)
    shutil.copy(text, tmp_path / "copy")
    again = _export(tiny_checkpoint, tmp_path / "artifact", tmp_path / "copy")
    contents = [
        {path.relative_to(each): path.read_bytes() for path in each.rglob("*") if path.is_file()}
        for each in (first, again)
    ]
    assert contents[0] == contents[1]
    assert not any(
        b"a text" in each or str(tmp_path).encode() in each
        for path, each in contents[0].items()
        if path.suffix == ".json" and path.name != "neuron_config.json"
    )
    artifact = Artifact.open(first)
    assert "--quantization-calibration " + artifact.manifest["origin"]["calibration"][:12] in export_command(
        artifact.manifest, artifact.config, "out"
    )
    plain = load_file(_export(tiny_checkpoint, tmp_path / "plain", None) / WEIGHTS_NAME)
    tensors = load_file(first / WEIGHTS_NAME)
    changed = {name.split(".")[-2] for name, each in tensors.items() if not torch.equal(each, plain[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_what_no_text_reaches_is_rounded_without_it_and_told(
    tiny_checkpoints: dict[str, Path],
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("optimum_neuron.checkpoints.quantize.importance._LEAST_TOKENS", 10**6)
    _export(tiny_checkpoints["llama"], tmp_path / "out", text)
    assert (
        "14 weights, as model.layers.0.self_attn.q_proj.weight, met too few tokens of the calibration text"
        in caplog.text
    )
    tensors, plain = (
        load_file(each / WEIGHTS_NAME)
        for each in (tmp_path / "out", _export(tiny_checkpoints["llama"], tmp_path / "plain", None))
    )
    assert all(torch.equal(each, plain[name]) for name, each in tensors.items())


def test_inputs_that_are_no_numbers_are_refused(tiny_checkpoint: Path) -> None:
    model = load_model(tiny_checkpoint)
    table = model.model.embed_tokens.weight.detach().clone()
    table[IDS[0, 0]] = torch.inf
    model.model.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
    layers = {"model.layers.0.mlp.up_proj": model.model.layers[0].mlp.up_proj}
    with pytest.raises(ValueError, match=r"the inputs of model.layers.0.mlp.up_proj.weight are not finite"):
        input_importance(model, layers, IDS)


def _write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "options", "error", "told"),
    [
        (lambda path: None, {}, FileNotFoundError, "is not there; name a file of text"),
        (lambda path: path.mkdir(), {}, FileNotFoundError, "is a folder; name a file of text"),
        (_write(b""), {}, ValueError, "is empty"),
        (_write(b" \n" * 999), {}, ValueError, "is empty"),
        (_write(TEXT.encode() + b"\xff\xfe"), {}, ValueError, f"is no text in UTF-8: byte {len(TEXT)} is 0xff"),
        (_write(b"text \0" * 999), {}, ValueError, "is no text: byte 5 is 0"),
        (_write(b"short"), {}, ValueError, "has 5 tokens, and weights are rounded on 512 of them at least"),
        (_write(b"a" * ((16 << 20) + 1)), {}, ValueError, "has 16,777,217 bytes, .* 16,777,216 at most"),
        (_write(TEXT.encode()), {"quantization": None}, ValueError, "and quantization=None; leave it out"),
        (_write(TEXT.encode()), {"quantization": "int8"}, ValueError, "and quantization='int8'; leave it out"),
        (_write(TEXT.encode()), {"quantization": "fp8"}, ValueError, "and quantization='fp8'; leave it out"),
        (_write(TEXT.encode()), {"quantization": "checkpoint"}, ValueError, "and quantization='checkpoint'"),
    ],
)
def test_a_text_of_no_use_is_refused_before_anything_is_written(
    make: Callable[[Path], object],
    options: dict[str, Any],
    error: type[Exception],
    told: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
) -> None:
    make(tmp_path / "text")
    with pytest.raises(error, match=told):
        _export(tiny_checkpoint, tmp_path / "here" / "out", tmp_path / "text", **options)
    assert not (tmp_path / "here").exists()


def test_a_checkpoint_without_a_tokenizer_or_with_anothers_is_refused(
    tiny_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
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


def test_an_artifact_takes_no_text(tiny_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    artifact = _export(tiny_checkpoint, tmp_path / "out", None)
    with pytest.raises(ValueError, match=r"is an option of an export, and .* is an artifact"):
        NeuronModelForCausalLM.from_pretrained(artifact, quantization_calibration=text)
    found = NeuronModelForCausalLM.from_pretrained(
        tiny_checkpoint, export=True, quantization_calibration=text, **SIZES
    )
    assert "calibration" in json.dumps(found.artifact.manifest["origin"])
