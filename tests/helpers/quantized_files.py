# SPDX-License-Identifier: Apache-2.0
"""Tiny quantized checkpoints, written as the formats' own documents say, without the code that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME
from optimum_neuron.checkpoints.formats import open_quantized
from optimum_neuron.checkpoints.formats.format import CheckpointFormat
from optimum_neuron.step.features.codes.weight import FP4_VALUES


LAYER = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{LAYER}.weight"
BLOCK = 32
WEIGHTS_FILE = "model.safetensors"


def opened(folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> CheckpointFormat:
    """Writes tensors by name, and one plain tensor beside them; opens them by a config with this quantization."""
    plain = {"model.norm.weight": torch.ones(4)}
    save_file({name: tensor.contiguous() for name, tensor in (plain | dict(tensors)).items()}, folder / WEIGHTS_FILE)
    return open_quantized({"model_type": "llama", "quantization_config": dict(quantization)}, folder, "tiny")


def check_read(
    folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], value: Tensor, *, kept: bool = True
) -> CheckpointFormat:
    """A layer's plain numbers, and its codes if they are `kept`, are those of a value, to the bit."""
    found = opened(folder, tensors, quantization)
    assert torch.equal(found.dequantize(WEIGHT), value)
    if kept:
        assert torch.equal(found.read_codes(WEIGHT).dequantize(), value)
    return found


def check_refused(
    folder: Path, tensors: Mapping[str, Tensor | None], settings: Mapping[str, Any], told: str, weight: str = WEIGHT
) -> None:
    """Reading a layer ends in a sentence with some words; tensors that are None are left out."""
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=told) as caught:
        opened(folder, kept, settings).read_codes(weight)
    assert "\n" not in str(caught.value)


def check_export_refused(told: str, checkpoint: Path, output: Path, **options: Any) -> None:
    """An export ends in one sentence before anything is written."""
    there = output.parent.exists(), sorted(output.parent.glob("*"))
    with pytest.raises(ValueError, match=told) as caught:
        export_tiny(checkpoint, output, **options)
    assert "\n" not in str(caught.value) and (output.parent.exists(), sorted(output.parent.glob("*"))) == there


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., n]` in int32 words `[..., ceil(n * bits / 32)]`, each code above those before it."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    total = torch.zeros(*padded.shape[:-1], padded.shape[-1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        total += padded[..., place::per_word] * 2 ** (bits * place)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Random whole numbers from `low` to `high`, both among them."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + 1e-3).to(dtype)


def change_config(checkpoint: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = checkpoint / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: document[name] for name in document if name not in drop}), encoding="utf-8")


def change_weights(checkpoint: Path, change: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    tensors = load_file(checkpoint / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS_FILE, metadata={"format": "pt"})
    return tensors


def quantize_to_fp8(checkpoint: Path) -> dict[str, Tensor]:
    """Writes weights as blocks of float8 with scales; returns what they stand for, in float32."""
    exact: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in [*tensors.items()]:
            exact[name] = tensor
            rows, columns = tensor.shape if tensor.dim() == 2 else (1, 1)
            if name.endswith("proj.weight") and not rows % BLOCK and not columns % BLOCK:
                blocks = tensor.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
                scales = blocks.abs().amax((1, 3)) / 448
                tensors[name] = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = scales
                plain = tensors[name].float().reshape(blocks.shape) * scales[:, None, :, None]
                exact[name] = plain.reshape(rows, columns)

    change_weights(checkpoint, change)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    change_config(checkpoint, quantization_config=method)
    return exact


def quantize_to_mxfp4(checkpoint: Path) -> dict[str, Tensor]:
    """Replaces experts by random blocks of 4-bit numbers; returns what they stand for."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    exact: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in [*tensors.items()]:
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, rows, columns = tensor.shape
                blocks = torch.randint(0, 256, (experts, columns, rows // BLOCK, BLOCK // 2), dtype=torch.uint8)
                scales = torch.randint(115, 123, (experts, columns, rows // BLOCK), dtype=torch.uint8)
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
                numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1)
                scaled = numbers.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
                exact[name] = scaled.flatten(-2).transpose(1, 2)
                del tensors[name]

    change_weights(checkpoint, change)
    change_config(checkpoint, quantization_config={"quant_method": "mxfp4"})
    return exact


def quantize_to_gptq(checkpoint: Path, *, act_order: bool = False) -> dict[str, Tensor]:
    """Replaces linear layers by random codes of 4 bits in groups of 32 inputs, which with `act_order` stand anywhere, with zero points."""
    exact: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in [*tensors.items()]:
            exact[name] = tensor
            if name.endswith("proj.weight"):
                outputs, inputs = tensor.shape
                groups, layer = inputs // BLOCK, name.removesuffix(".weight")
                codes, zeros = whole(0, 15, inputs, outputs), whole(1, 15, groups, outputs, seed=2)
                scale = scales(groups, outputs) * 0.1
                tensors[f"{layer}.qweight"] = words(codes.T, 4).T.contiguous()
                tensors[f"{layer}.qzeros"] = words(zeros - 1, 4)
                tensors[f"{layer}.scales"] = scale
                places = torch.arange(inputs) // BLOCK
                if act_order:
                    places = places[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
                    tensors[f"{layer}.g_idx"] = places.int()
                exact[name] = ((codes - zeros[places]).float() * scale.float()[places]).T
                del tensors[name]

    change_weights(checkpoint, change)
    method = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": act_order, "sym": False}
    change_config(checkpoint, quantization_config=method)
    return exact


def dequantized_model(artifact: Path) -> tuple[PreTrainedModel, set[str]]:
    """transformers' model with the weights that an artifact's codes stand for, and the kinds of codes; written out once more."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(artifact), dtype=torch.float32).eval()
    tensors = load_file(artifact / WEIGHTS_NAME)
    tied = json.loads((artifact / MANIFEST_NAME).read_text(encoding="utf-8"))["tied_weights"]
    tensors |= {name: tensors[stored] for name, stored in tied.items()}
    forms = json.loads((artifact / QUANTIZATION_NAME).read_text(encoding="utf-8"))["weights"]
    for name, form in forms.items():
        of_experts = f"model.{name}_codes" in tensors
        join = f"model.{name}{'_' if of_experts else '.'}"
        codes, scale = tensors[f"{join}codes"], tensors[f"{join}scale"].float()
        if form["kind"] in ("int4", "fp4"):
            codes = torch.stack([codes % 16, codes // 16], -1).flatten(-2)
        table = {"fp4": torch.tensor(FP4_VALUES), "int4": torch.arange(16) - (0.0 if form["has_shift"] else 8.0)}
        values = table[form["kind"]][codes.int()] if form["kind"] in table else codes.float()
        each = values.shape[-1] // form["groups"]
        weight = values * scale.repeat_interleave(each, -1)
        if form["has_shift"]:
            weight += tensors[f"{join}shift"].repeat_interleave(each, -1)
        path, _, own = (name if of_experts else f"{name}.weight").rpartition(".")
        as_the_module = weight if weight.shape == getattr(model.get_submodule(path), own).shape else weight.mT
        tensors[f"model.{path}.{own}"] = as_the_module
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
        for name, buffer in model.named_buffers():
            buffer.copy_(tensors[f"model.{name}"])
    return model, {form["kind"] for form in forms.values()}
