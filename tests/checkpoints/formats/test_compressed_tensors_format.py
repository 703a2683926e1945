# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors layers stand for (code - zero point) * scale to the bit; what is not read is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import LAYER, WEIGHT, check_read, check_refused, opened, scales, whole, words
from torch import Tensor

from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.formats.stored import NotKeptError


OUTPUTS, INPUTS = 24, 64
GROUPED: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def config(weights: dict[str, Any], form: str, group: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, **(group or {})}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "quantization_status": "compressed", **more,
    }  # fmt: skip


def packed(
    bits: int, groups: int, *, zero: bool = False, dtype: torch.dtype = torch.bfloat16, group: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer of "pack-quantized", and the weight that it stands for: signed codes, stored above the least of them."""
    middle = 2 ** (bits - 1)
    codes = whole(-middle, middle - 1, OUTPUTS, INPUTS)
    points = whole(-middle, middle - 1, OUTPUTS, groups, seed=2) if zero else torch.zeros(OUTPUTS, groups).long()
    scale = scales(OUTPUTS, groups, dtype=dtype)
    order = torch.arange(INPUTS) // (INPUTS // groups) if group is None else group
    value = (codes - points[:, order]).float() * scale.float()[:, order]
    tensors = {
        "weight_packed": words(codes + middle, bits), "weight_scale": scale,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }  # fmt: skip
    if zero:
        tensors["weight_zero_point"] = words((points + middle).T, bits).T
    if group is not None:
        tensors["weight_g_idx"] = group.int()
    return {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, value


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("bits", "groups"), [(4, 2), (4, 1), (8, 2), (8, 1)])
def test_packed_layers(bits: int, groups: int, zero: bool, tmp_path: Path) -> None:
    tensors, value = packed(bits, groups, zero=zero, dtype=torch.float16 if bits == 8 else torch.bfloat16)
    weights = GROUPED | {"num_bits": bits, "symmetric": not zero}
    if groups == 1:
        weights |= {"strategy": "channel", "group_size": None}
    found = check_read(tmp_path, tensors, config(weights, "pack-quantized"), value)
    weight = found.read_codes(WEIGHT)
    assert found.layers == (WEIGHT,) and found.plain == ("model.norm.weight",) and not found.notices
    assert weight.kind == f"int{bits}" and weight.group_size == INPUTS // groups
    assert (weight.shift is not None) == zero


def test_inputs_that_fill_no_word_are_padded_and_groups_may_have_an_order_of_their_own(tmp_path: Path) -> None:
    codes, scale = whole(-8, 7, 4, 36), scales(4, 1)
    parts = {"weight_packed": words(codes + 8, 4), "weight_scale": scale, "weight_shape": torch.tensor([4, 36])}
    settings = config(GROUPED | {"strategy": "channel", "group_size": -1}, "pack-quantized")
    named = {f"{LAYER}.{part}": tensor for part, tensor in parts.items()}
    check_read(tmp_path, named, settings, codes.float() * scale.float())
    order = torch.tensor([1, 0]).repeat_interleave(32)
    tensors, value = packed(4, 2, group=order)
    settings = config(GROUPED | {"actorder": "group"}, "pack-quantized")
    check_read(tmp_path, tensors, settings, value)
    tensors, value = packed(4, 2, group=order[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))])
    found = check_read(tmp_path, tensors, settings, value, kept=False)
    with pytest.raises(NotKeptError, match="do not stand side by side"):
        found.read_codes(WEIGHT)
    tensors, value = packed(4, 2)
    tensors[f"{LAYER}.weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)
    check_read(tmp_path, tensors, settings, value)


@pytest.mark.parametrize("shape", [(1,), (), (OUTPUTS, 1), (OUTPUTS, 4)])
@pytest.mark.parametrize("zero", [False, True])
def test_whole_numbers_of_8_bits(shape: tuple[int, ...], zero: bool, tmp_path: Path) -> None:
    codes, scale = whole(-128, 127, OUTPUTS, INPUTS).to(torch.int8), scales(*shape)
    points = whole(-128, 127, *shape, seed=2).to(torch.int8)
    named = {WEIGHT: codes, f"{LAYER}.weight_scale": scale}
    if zero:
        named[f"{LAYER}.weight_zero_point"] = points
    strategy = {1: "tensor", OUTPUTS: "channel"}.get(scale.numel(), "group")
    weights = {"num_bits": 8, "strategy": strategy, "symmetric": not zero}
    if strategy == "group":
        weights["group_size"] = INPUTS // 4
    wide = scale.float() if scale.dim() == 2 else scale.float().reshape(1, 1)
    place = torch.arange(INPUTS) // (INPUTS // wide.shape[1])
    offset = points.reshape(wide.shape).float()[:, place] if zero else 0.0
    value = (codes.float() - offset) * wide[:, place]
    check_read(tmp_path, named, config(weights, "int-quantized"), value)


@pytest.mark.parametrize(
    ("strategy", "shape", "more"),
    [
        ("tensor", (1,), {}), ("channel", (OUTPUTS, 1), {}), ("block", (2, 4), {"block_structure": [16, 16]}),
        ("block", (2, 4), {"block_structure": "16x16"}),
    ],
)  # fmt: skip
def test_floats_of_8_bits(strategy: str, shape: tuple[int, ...], more: dict[str, Any], tmp_path: Path) -> None:
    codes = (torch.randn(OUTPUTS, INPUTS) * 30).to(torch.float8_e4m3fn)
    scale = scales(*shape, dtype=torch.float32)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    named = {WEIGHT: codes, f"{LAYER}.weight_scale": scale, f"{LAYER}.input_scale": torch.ones(1)}
    found = opened(
        tmp_path, named, config(weights, "float-quantized", {"input_activations": {"num_bits": 8, "dynamic": False}})
    )
    rows, columns = torch.arange(OUTPUTS), torch.arange(INPUTS)
    wide = scale.reshape(1, 1) if strategy == "tensor" else scale
    spread = wide[rows // 16][:, columns // 16] if strategy == "block" else wide
    assert torch.equal(found.read_codes(WEIGHT).dequantize(), codes.float() * spread)
    assert found.notices == ("tiny also asks for quantized inputs of its layers; they stay as they are",)
    assert found.plain == ("model.norm.weight",)


def test_a_cache_of_8_bits_keeps_the_export_s_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, exact = packed(4, 2)
    tensors |= {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    document = config(GROUPED, "pack-quantized", kv_cache_scheme={"num_bits": 8})
    found = opened(tmp_path, tensors, document)
    assert torch.equal(found.dequantize(WEIGHT), exact) and found.plain == ("model.norm.weight",)
    assert found.notices == ("tiny also asks for a quantized KV cache; the export chooses its type",)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": document}), encoding="utf-8")
    assert Checkpoint(tmp_path, None, "tiny", trust_remote_code=False)._form is not None
    assert caplog.messages == [*found.notices]


def test_a_layer_has_the_scheme_of_the_target_that_names_it_most_closely(tmp_path: Path) -> None:
    tensors, value = packed(8, 1)
    settings = config(GROUPED, "pack-quantized")
    eight = {"num_bits": 8, "strategy": "channel"}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": eight}
    assert torch.equal(opened(tmp_path, tensors, settings).read_codes(WEIGHT).dequantize(), value)
    settings["config_groups"]["group_1"]["targets"] = [LAYER]
    settings["config_groups"]["group_2"] = {"targets": ["re:.*"], "weights": GROUPED}
    assert torch.equal(opened(tmp_path, tensors, settings).read_codes(WEIGHT).dequantize(), value)
    settings["config_groups"]["group_1"]["targets"] = ["Linear"]
    del settings["config_groups"]["group_2"]
    with pytest.raises(ValueError, match="more than one scheme"):
        opened(tmp_path, tensors, settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (config(GROUPED, "nvfp4-pack-quantized"), "the format 'nvfp4-pack-quantized'"),
        (config(GROUPED, "marlin-24"), "the format 'marlin-24'"),
        (config(GROUPED, "mixed-precision"), "no format of its own"),
        (config(GROUPED, "pack-quantized", sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (config(GROUPED, "pack-quantized", transform_config={"config_groups": {}}), "transformed weights"),
        (config(GROUPED, "pack-quantized", config_groups={}), "no config_groups"),
        (config(GROUPED, "pack-quantized", config_groups={"W4A16": ["Linear"]}), "W4A16=.*no object"),
        (config(GROUPED | {"num_bits": 3}, "pack-quantized"), "weights of 3 bits"),
        (config(GROUPED | {"type": "float"}, "pack-quantized"), "type float"),
        (config(GROUPED | {"dynamic": True}, "pack-quantized"), "dynamic weights"),
        (config(GROUPED | {"strategy": "tensor_group"}, "pack-quantized"), "scales by tensor_group"),
        (config(GROUPED | {"strategy": "block"}, "pack-quantized"), "block_structure=None"),
        (config(GROUPED | {"group_size": 48}, "pack-quantized"), "64 inputs, which are no groups of 48"),
        (config(GROUPED | {"group_size": 16}, "pack-quantized"), r"has scales \[24, 4\]"),
        (config(GROUPED | {"strategy": "channel"}, "pack-quantized"), r"weight_scale has the shape \[24, 2\]"),
        (config(GROUPED | {"symmetric": False}, "pack-quantized"), "lacks weight_zero_point"),
        (config(GROUPED, "int-quantized"), "lacks weight"),
        (config({}, "pack-quantized"), "quantizes no weights"),
        (config({"type": "float", "symmetric": False}, "float-quantized"), "zero points for floats"),
        (config(GROUPED, "pack-quantized", ignore=["re:.*q_proj"]), r"ignores it by 're:\.\*q_proj'"),
        (config(GROUPED, "pack-quantized", {"targets": ["re:.*mlp.*"]}), "no scheme for it"),
        (config(GROUPED, "pack-quantized", {"targets": ["re:(("]}), r"the pattern '\(\('"),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    check_refused(tmp_path, packed(4, 2)[0], settings, told)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_that_no_code_has_is_refused(bits: int, tmp_path: Path) -> None:
    end = 1 << (bits - 1)
    named = {WEIGHT: whole(-8, 7, OUTPUTS, INPUTS).to(torch.int8), f"{LAYER}.weight_scale": scales(OUTPUTS, 1)}
    settings = config({"num_bits": bits, "strategy": "channel", "symmetric": False}, "int-quantized")
    points = named[f"{LAYER}.weight_zero_point"] = whole(-end, end - 1, OUTPUTS, 1).float()
    for value in (float("nan"), float("inf"), 0.5, -1e-3, 300.0, float(end), float(-end - 1)):
        points[3] = value
        words = rf"weight_zero_point holds the zero point {re.escape(f'{value:g}')}, and codes have whole ones of -{end} to"
        with pytest.raises(ValueError, match=words):
            opened(tmp_path, named, settings).read_codes(WEIGHT)
    points[3] = end - 1
    assert opened(tmp_path, named, settings).read_codes(WEIGHT).dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("part", "tensor", "told"),
    [
        ("weight_packed", None, "lacks weight_packed"),
        ("weight_shape", torch.tensor([24, 10**9]), r"it holds \[24, 1000000000\] codes"),
        ("weight_shape", torch.tensor([24, -64]), r"it holds \[24, -64\] codes"),
        ("weight_scale", torch.full((24, 2), float("nan")).half(), "a scale of nan"),
        ("weight_zero_point", torch.ones(24, 2, dtype=torch.int8), "is not zero, and its scheme is symmetric"),
        ("weight_g_idx", torch.zeros(64, dtype=torch.int32), "groups of other than 32 inputs"),
        ("weight_g_idx", torch.full((64,), 7, dtype=torch.int32), "names groups 7 to 7"),
        ("weight_global_scale", torch.ones(1), "belongs to a scheme that is not read"),
    ],
)
def test_a_damaged_layer_is_told_by_its_tensor(part: str, tensor: Tensor | None, told: str, tmp_path: Path) -> None:
    check_refused(tmp_path, packed(4, 2)[0] | {f"{LAYER}.{part}": tensor}, config(GROUPED, "pack-quantized"), told)
