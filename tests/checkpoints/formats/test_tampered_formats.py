# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a checkpoint's tensors or settings is told in a sentence, or changes nothing that is read."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import test_compressed_tensors_format as compressed
import test_fp8_format as fp8
import test_gptq_format as gptq
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import opened, scales
from torch import Tensor

from optimum_neuron.checkpoints.formats.stored import NotKeptError


def checkpoints() -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    packed, eight = compressed.packed(4, 2, zero=True)[0], compressed.GROUPED | {"symmetric": False}
    return [
        (gptq.layer(group=torch.arange(64) // 32)[0], gptq.GPTQ),
        (gptq.awq_layer(3)[0], gptq.AWQ),
        ({fp8.WEIGHT: fp8.codes(64, 64), fp8.SCALE: scales(2, 2)}, fp8.FP8),
        (fp8.mxfp4_tensors(), fp8.MXFP4),
        (packed, compressed.config(eight, "pack-quantized")),
    ]


CHECKPOINTS = checkpoints()
JUNK = st.sampled_from([None, -1, 0, 3, 2**70, 1.5, "x", "re:((", [], [1], {}, {"x": 1}, True, [0, 0], [[]]])
DTYPES = st.sampled_from([torch.int8, torch.uint8, torch.int64, torch.float16, torch.float64, torch.float8_e5m2])


def other_tensor(tensor: Tensor, draw: st.DrawFn) -> Tensor:
    way = draw(st.sampled_from(["cast", "flat", "cut", "more", "empty", "scalar", "filled"]))
    if way == "cast":
        return tensor.float().to(draw(DTYPES))
    if way == "filled" and tensor.dtype.is_floating_point:
        value = draw(st.sampled_from([float("nan"), float("-inf"), 3e38, 0.0]))
        return torch.full_like(tensor.float(), value).to(tensor.dtype)
    if way == "filled":
        return torch.full_like(
            tensor, draw(st.sampled_from([-1, 0, 127])) & (255 if tensor.dtype == torch.uint8 else -1)
        )
    if way == "more":
        return torch.stack((tensor, tensor))
    return {"flat": tensor.flatten(), "cut": tensor[:1], "empty": tensor[:0], "scalar": tensor.flatten()[0]}[way]


@st.composite
def tampered(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, settings = draw(st.sampled_from(CHECKPOINTS))
    tensors, settings = dict(tensors), copy.deepcopy(settings)
    name = draw(st.sampled_from(sorted(tensors)))
    match draw(st.sampled_from(["tensor", "drop", "rename", "setting"])):
        case "tensor":
            tensors[name] = other_tensor(tensors[name], draw)
        case "drop":
            del tensors[name]
        case "rename":
            tensors[draw(st.sampled_from(["x", "x.weight", f"y.{name}", f"{name}_scale"]))] = tensors.pop(name)
        case _:
            places = [settings]
            for group in settings.get("config_groups", {}).values():
                places += [settings["config_groups"], group, group["weights"]]
            place = draw(st.sampled_from(places))
            names = sorted({*place, "dynamic", "weight_block_size"} - {"quant_method"})
            place[draw(st.sampled_from(names))] = draw(JUNK)
    return tensors, settings


@given(checkpoint=tampered())
@examples(400)
def test_a_tampered_checkpoint_is_told_in_a_sentence(checkpoint: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, settings = checkpoint
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = opened(Path(folder), tensors, settings)
            for name in found.layers:
                values = found.dequantize(name)
                assert values.isfinite().all()
                try:
                    assert torch.equal(found.read_codes(name).dequantize(), values)
                except NotKeptError as error:
                    assert "--dequantize" in str(error)
            for name in found.plain:
                found.read_plain(name)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
