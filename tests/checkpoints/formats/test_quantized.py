# SPDX-License-Identifier: Apache-2.0
"""Which format a checkpoint has is told by its config, and what its files hold by their headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from optimum_neuron.checkpoints.formats.tensors import TensorFiles
from optimum_neuron.checkpoints.quantized import READERS, quantization_of


OTHERS = ("auto-round", "bitnet", "bitsandbytes", "fbgemm_fp8", "hqq", "modelopt", "nvfp4", "quark", "torchao", "gguf")


@pytest.mark.parametrize("method", OTHERS)
def test_other_formats_are_refused_by_name(method: str) -> None:
    with pytest.raises(ValueError, match=f"tiny is quantized by {method}, which is not read; export") as caught:
        quantization_of({"quantization_config": {"quant_method": method}}, "tiny")
    assert all(name in str(caught.value) for name in READERS) and "--dequantize" not in str(caught.value)


def test_a_checkpoint_that_names_no_quantization_has_no_format() -> None:
    assert quantization_of({"model_type": "llama", "quantization_config": None}, "tiny") == {}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization_config": "gptq"}, "quantization_config='gptq', which is no object"),
        ({"quantization_config": {}}, "a method without a name"),
        ({"quantization_config": {"quant_method": 4}}, "quant_method=4, which is no text"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quantized by hqq"),
    ],
)
def test_a_config_that_says_something_else_is_told(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        quantization_of(config, "tiny")


def _sharded(folder: Path, second: dict[str, torch.Tensor], indexed: list[str]) -> None:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file(second, folder / "two.safetensors")
    names = {name: "one.safetensors" if name == "a" else "two.safetensors" for name in indexed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_tensors_are_read_from_all_files(tmp_path: Path) -> None:
    _sharded(tmp_path, {"b": torch.zeros(3, dtype=torch.int8)}, ["a", "b"])
    files = TensorFiles(tmp_path, "tiny")
    assert sorted(files.names) == ["a", "b"] and files.dtype("b") == "I8"
    assert torch.equal(files.read_tensor("b", torch.int8, shape=(3,)), torch.zeros(3, dtype=torch.int8))


@pytest.mark.parametrize(
    ("second", "indexed", "told"),
    [
        ("a", ["a", "b"], "tiny holds a twice"),
        ("b", ["a", "b", "c"], "tiny lacks c, which model.safetensors.index.json names"),
    ],
)
def test_files_that_contradict_their_index_are_refused(
    second: str, indexed: list[str], told: str, tmp_path: Path
) -> None:
    _sharded(tmp_path, {second: torch.ones(2)}, indexed)
    with pytest.raises(ValueError, match=told):
        TensorFiles(tmp_path, "tiny")


def test_a_tensor_lies_in_the_mapped_file(tmp_path: Path) -> None:
    """Reading it takes no memory of its own: it shares that of the whole file."""
    save_file({"a": torch.ones(64), "b": torch.ones(1 << 20)}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, "tiny")
    one, two = files.read_tensor("a"), files.read_tensor("b")
    assert one.untyped_storage().nbytes() >= 256 and two.data_ptr() != one.data_ptr()
    assert files.read_tensor("b").data_ptr() == two.data_ptr()
