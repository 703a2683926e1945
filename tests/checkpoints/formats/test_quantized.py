# SPDX-License-Identifier: Apache-2.0
"""A config names a checkpoint's format; an error in its patterns, settings or tensors gives one sentence, or changes nothing."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import test_compressed_tensors_format as compressed
import test_fp8_format as fp8
import test_gptq_format as gptq
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import opened, scales
from safetensors.torch import save_file
from torch import Tensor

from optimum_neuron.checkpoints.formats import READERS, quantization_of, settings
from optimum_neuron.checkpoints.formats.format import TensorFiles
from optimum_neuron.checkpoints.formats.settings import begins_with
from optimum_neuron.checkpoints.formats.stored import NotKeptError


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *(({"quantization_config": {"quant_method": each}}, f"tiny is quantized by {each}, which is not read; export")
          for each in ("bitsandbytes", "nvfp4", "gguf")),
        ({"quantization_config": "gptq"}, "quantization_config='gptq', which is no object"),
        ({"quantization_config": {}}, "a method without a name"),
        ({"quantization_config": {"quant_method": 4}}, "quant_method=4, which is no text"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quantized by hqq"),
    ],
)  # fmt: skip
def test_other_formats_and_what_is_no_config_are_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        quantization_of(config, "tiny")
    if "not read" in told:
        assert all(name in str(caught.value) for name in READERS) and "--dequantize" not in str(caught.value)
    assert quantization_of({"model_type": "llama", "quantization_config": None}, "tiny") == {}


def test_tensors_lie_in_the_mapped_files_that_an_index_names(tmp_path: Path) -> None:
    """Reading one takes no memory of its own: it shares that of the whole file."""
    save_file({"a": torch.ones(64), "b": torch.ones(1 << 20)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(3, dtype=torch.int8)}, tmp_path / "two.safetensors")
    names, index = {"a": "one", "b": "one", "c": "two", "d": "two"}, tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{file}.safetensors" for name, file in names.items()}}))
    with pytest.raises(ValueError, match=r"tiny lacks d, which model\.safetensors\.index\.json names"):
        TensorFiles(tmp_path, "tiny")
    index.write_text(json.dumps({"weight_map": {name: f"{names[name]}.safetensors" for name in "abc"}}))
    files = TensorFiles(tmp_path, "tiny")
    assert sorted(files.names) == ["a", "b", "c"] and files.dtype("c") == "I8"
    assert torch.equal(files.read_tensor("c", torch.int8, shape=(3,)), torch.zeros(3, dtype=torch.int8))
    one, two = files.read_tensor("a"), files.read_tensor("b")
    assert one.untyped_storage().nbytes() >= 256 and two.data_ptr() != one.data_ptr()
    assert files.read_tensor("b").data_ptr() == two.data_ptr()


NAME = "model.layers.12.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (".*", True), (".*self_attn", True), ("self_attn", False), (r"model\.layers\.(1[0-2]|[0-9])\..*q_proj$", True),
        (r"^(?!.*(mlp|lm_head)).*", True), (r"^(?!.*self_attn).*", False), (r".*layers\.\d{2}\.[^.]*\.[qkv]_proj", True),
        (r"model\.layers\.\d\.", False), (r".*\.(?:[5-9]|1[0-9])\..*gate.*", False), (r".*self_attn\.(?:q|k_b)_proj$", True),
        (r"(?i)MODEL\.(.)ayers", True),
    ],
)  # fmt: skip
def test_patterns_as_checkpoints_have_them(pattern: str, found: bool) -> None:
    assert begins_with(pattern, NAME) == found


def test_a_pattern_that_takes_exponential_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"which takes more than 0\.01 s for the name 'aaaaaa"):
        begins_with("(?:a|aa|ab|b)*x|(?:a|aa|ab|b)*y", "a" * 60 + "c")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("((", "missing"), ("a{3,2}", "correct config"), ("(" * 1500 + ")" * 1500, "recursion"),
        ("(((.{99}){99}){99}){99}", "repeats a part more than 10,000 times"), ("a{99999999999999999999}", "repeats a part"),
    ],
)  # fmt: skip
def test_what_is_no_expression_or_too_large_is_told_in_a_sentence(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        begins_with(pattern, NAME)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


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
