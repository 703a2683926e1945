# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint's own codes reach the artifact to the bit, or nothing does; and nobody's weights are made plain unasked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapting import export as export_with
from adapting import lora, make_adapter
from gguf_files import write_gguf
from helpers import artifact_runner, export_tiny, prefill_pieces, random_tokens, weights_of
from quantized_files import (
    change_config,
    change_weights,
    check_export_refused,
    dequantized_model,
    quantize_to_fp8,
    quantize_to_gptq,
    quantize_to_mxfp4,
)
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME, read_formats
from optimum_neuron.checkpoints.formats.format import SafetensorsFormat
from optimum_neuron.step.features.codes.weight import QuantizedWeight


KEEP = {"quantization": "checkpoint"}
# A model, and what quantizes its checkpoint and tells what the codes stand for, and their kinds.
CASES: dict[str, tuple[str, Callable[[Path], dict[str, Tensor]], str]] = {
    "fp8": ("llama", quantize_to_fp8, "fp8"),
    "fp8 of single experts": ("deepseek_v3", quantize_to_fp8, "fp8"),
    "mxfp4": ("gpt_oss", quantize_to_mxfp4, "fp4"), "gptq": ("llama", quantize_to_gptq, "int4"),
}  # fmt: skip


def _checkpoint(folder: Path, tiny: dict[str, Path], name: str) -> tuple[Path, dict[str, Tensor], str]:
    model, quantize, kind = CASES[name]
    checkpoint = Path(shutil.copytree(tiny[model], folder / model))
    return checkpoint, quantize(checkpoint), kind


def _check(artifact: Path, exact: dict[str, Tensor], kind: str) -> None:
    """That codes stand for the weights of a checkpoint, and that steps compute with these."""
    peer, kinds = dequantized_model(artifact)
    assert kind in kinds
    own = peer.state_dict()
    assert all(torch.equal(own[name], tensor.float()) for name, tensor in exact.items() if name in own)
    assert any(name in own for name in exact)
    prompt = random_tokens(21)
    logits = prefill_pieces(artifact_runner(artifact), 0, prompt, [8, 8, 5])
    with torch.no_grad():
        expected = peer(torch.from_numpy(prompt)[None].long()).logits[0, -1]
    assert (logits - expected).abs().amax() < 1e-5 * (expected.amax() - expected.amin())


@pytest.mark.parametrize("name", CASES)
def test_codes_of_safetensors_are_kept(name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, exact, kind = _checkpoint(tmp_path, tiny_checkpoints, name)
    _check(export_tiny(checkpoint, tmp_path / "out", **KEEP), exact, kind)


@pytest.mark.parametrize(("stored", "kind"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")])
def test_codes_of_a_gguf_file_are_kept_unasked(stored: str, kind: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", stored)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "out")
    _check(artifact, exact, kind)
    assert Artifact.open(artifact).config.quantization == "checkpoint"


def test_blocks_of_a_gguf_file_that_no_codes_stand_for_become_plain_with_a_warning(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "IQ4_NL")
    words = "IQ4_NL, which holds no codes times scales; pass --dequantize"
    check_export_refused(words, tmp_path / "tiny.gguf", tmp_path / "out", **KEEP)
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "out")
    assert "quantized weights are exported as plain numbers" in caplog.text
    assert Artifact.open(artifact).config.quantization is None
    weights = weights_of(Artifact.open(artifact))
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize("place", ["model.layers.2", "mtp.layers.0"])
def test_codes_for_further_tokens_are_left_out(place: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, exact, kind = _checkpoint(tmp_path, tiny_checkpoints, "fp8 of single experts")

    def add_layer(tensors: dict[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in tensors.items() if "layers.1." in name}
        tensors |= {name.replace("model.layers.1", place): tensor.roll(1, 0) for name, tensor in own.items()}
        tensors[f"{place}.eh_proj.weight"] = torch.ones(64, 128)

    change_weights(checkpoint, add_layer)
    _check(export_tiny(checkpoint, tmp_path / "artifact", **KEEP), exact, kind)


def test_in_bfloat16_codes_are_those_of_the_checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, exact, _ = _checkpoint(tmp_path, tiny_checkpoints, "fp8")
    peer, _ = dequantized_model(export_tiny(checkpoint, tmp_path / "out", dtype="bfloat16", **KEEP))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(peer.state_dict()[name], exact[name])


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_dequantized_where_that_is_asked_for(act_order: bool, tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "gptq"))
    exact = quantize_to_gptq(checkpoint, act_order=act_order)
    words = "is quantized, and quantization='int8' would round its weights once more; leave it out"
    if act_order:
        words = r"inputs of one group that do not stand side by side .*; pass --dequantize to"
    check_export_refused(words, checkpoint, tmp_path / "out", quantization=None if act_order else "int8")
    artifact = export_tiny(checkpoint, tmp_path / "out", dequantize=True)
    assert not (artifact / QUANTIZATION_NAME).exists()
    weights = weights_of(Artifact.open(artifact))
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in exact.items())


def test_codes_of_another_model_leave_nothing(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, _, _ = _checkpoint(tmp_path, tiny_checkpoints, "gptq")
    change_config(checkpoint, intermediate_size=128)
    check_export_refused("has the shape", checkpoint, tmp_path / "out", **KEEP)

    def rename(tensors: dict[str, Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            tensors[f"model.layers.7.mlp.up_proj.{part}"] = tensors.pop(f"model.layers.1.mlp.up_proj.{part}")

    change_config(checkpoint, intermediate_size=96)
    change_weights(checkpoint, rename)
    check_export_refused("layers.1.mlp.up_proj", checkpoint, tmp_path / "out", **KEEP)


def test_what_has_no_codes_keeps_none(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    plain = tiny_checkpoints["llama"]
    coded, _, _ = _checkpoint(tmp_path, tiny_checkpoints, "gptq")
    adapter = make_adapter(plain, tmp_path / "adapter", lora())
    check_export_refused("is not quantized, and is to keep", plain, tmp_path / "out", **KEEP)
    check_export_refused("is not quantized, and is to dequantize", plain, tmp_path / "out", dequantize=True)
    check_export_refused("leave out one of them", plain, tmp_path / "out", dequantize=True, **KEEP)
    with pytest.raises(ValueError, match="an adapter is merged into plain weights; pass --dequantize"):
        export_with(coded, tmp_path / "out", adapter, **KEEP)
    assert not (tmp_path / "out").exists()


def test_codes_that_stand_for_other_numbers_than_the_model_s_arecheck_export_refused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _, _ = _checkpoint(tmp_path, tiny_checkpoints, "fp8")
    read = SafetensorsFormat.read_codes

    def other(form: SafetensorsFormat, name: str) -> QuantizedWeight:
        return replace(read(form, name), scale=read(form, name).scale * 1.01)

    monkeypatch.setattr(SafetensorsFormat, "read_codes", other)
    words = "stand for other numbers than transformers loads; pass --dequantize"
    check_export_refused(words, checkpoint, tmp_path / "out", **KEEP)


@pytest.mark.parametrize("target", ["eager", "cpu"])
def test_a_table_of_codes_is_one_with_its_head(target: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    tied = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tied"))
    change_config(tied, tie_word_embeddings=True)
    change_weights(tied, lambda tensors: tensors.pop("lm_head.weight"))
    exact = write_gguf(tied, tmp_path / "tiny.gguf", "Q8_0", without=("lm_head.weight",))
    artifact = export_tiny(tmp_path / "tiny.gguf", tmp_path / "out", target=target)
    assert read_formats(artifact)["model.embed_tokens"].groups == 2
    names = weights_of(Artifact.open(artifact))
    assert not any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in names)
    _check(artifact, exact, "int8")


def test_codes_rounded_twice_are_told(tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", "Q4_1")
    export_tiny(tmp_path / "tiny.gguf", tmp_path / "plain", dequantize=True)
    assert "a second time" not in caplog.text
    export_tiny(tmp_path / "tiny.gguf", tmp_path / "out", dequantize=True, quantization="int4")
    assert "is quantized, and --quantization int4 rounds its weights a second time" in caplog.text
