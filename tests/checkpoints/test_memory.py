# SPDX-License-Identifier: Apache-2.0
"""No export holds a second copy of the model in memory: what is not in a checkpoint's files lies in files without a name meanwhile."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny, folder_bytes
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, modeling_utils

from optimum_neuron.artifact import weight_file
from optimum_neuron.checkpoints import mapped
from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.mapped import give_back, in_file, map_tensors, scratch_folder, tensors_in_files
from optimum_neuron.export import recipe
from optimum_neuron.targets.eager import EagerTarget


def touched() -> int:
    """Bytes of this process's memory that no file holds."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def test_weights_are_never_in_memory_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast, joined and rounded to codes: neither the plain weights nor the codes are."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    found: list[int] = []

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(touched())
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(recipe, "inspect_model", looking(recipe.inspect_model))
    monkeypatch.setattr(EagerTarget, "compile", looking(EagerTarget.compile))
    monkeypatch.setattr(weight_file, "tensor_bytes", looking(weight_file.tensor_bytes))
    gc.collect()
    before = touched()
    artifact = export_tiny(tmp_path / "model", tmp_path / "artifact", dtype="bfloat16", quantization="int8")
    codes = (artifact / "weights" / "model.safetensors").stat().st_size
    assert len(found) > 20 and max(found) - before < codes / 2, (before, found)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_LEAST", 1)


def lies(tensor: Tensor) -> str | None:
    return mapped._mapping_of(tensor.data_ptr())


# Cast, joined, rounded and tied.
SAME: dict[str, Any] = {"gpt_oss": {"dtype": "bfloat16"}, "deepseek_v3": {}, "gemma2": {"quantization": "int8"}}


@pytest.mark.parametrize("name", SAME)
def test_an_artifact_is_the_same_wherever_its_weights_lay_meanwhile(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = SAME[name]
    expected = folder_bytes(export_tiny(tiny_checkpoints[name], tmp_path / "memory", **options))
    monkeypatch.setattr(mapped, "_LEAST", 1)
    assert folder_bytes(export_tiny(tiny_checkpoints[name], tmp_path / "files", **options)) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "memory"]


def test_a_loaded_model_lies_in_files(tiny_checkpoints: dict[str, Path], tmp_path: Path, everything: None) -> None:
    """As it is where types agree; nothing but buffers that no file has is made."""
    llama, tied = (Checkpoint(tiny_checkpoints[name], None, name, False) for name in ("llama", "gemma2"))
    with scratch_folder(tmp_path), tensors_in_files():
        as_it_is, cast = (llama.load_model(dtype) for dtype in ("float32", "bfloat16"))
        model: Any = tied.load_model("bfloat16")
    assert all(lies(each) == mapped._FILE for own in (as_it_is, cast, model) for each in own.parameters())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for each, own in zip(as_it_is.parameters(), cast.parameters(), strict=True):
        assert torch.equal(each.to(torch.bfloat16), own)
    own.mul_(2)  # a file without a name may be written to
    assert list(tmp_path.iterdir()) == []


def test_tensors_in_files_are_those_that_they_were(tmp_path: Path, everything: None) -> None:
    tensors = [torch.randn(5, 3).T, torch.randn(4, 4).to(torch.float8_e4m3fn), torch.arange(6), torch.ones(1)]
    with scratch_folder(tmp_path):
        moved = [in_file(each) for each in tensors]
        assert all(lies(each) == mapped._FILE for each in moved)
        assert [in_file(each).data_ptr() for each in moved] == [each.data_ptr() for each in moved]
        for each, other in zip(tensors, moved, strict=True):
            give_back(other)
            assert other.dtype == each.dtype and torch.equal(other.float(), each.float())
        assert in_file(torch.empty(2, device="meta")).is_meta
    assert in_file(tensors[0]) is tensors[0], "where there is no folder, there are no files"
    module = nn.Linear(2, 2)
    with tensors_in_files():
        module.weight = nn.Parameter(torch.ones(2, 2))
    assert lies(module.weight) is None and list(tmp_path.iterdir()) == []


def test_mapped_files_hold_what_safetensors_finds_in_them(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.uint8), "none": torch.empty(0, 4)}
    tensors |= {"c": torch.randn(2).to(torch.bfloat16)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    # A head of another length, behind which no tensor lies at a multiple of its type's size.
    path.write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    found = map_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], each) and found[name].dtype == each.dtype for name, each in tensors.items())
    # A type that is not mapped is read by safetensors.
    save_file({"a": torch.ones(3).to(torch.float8_e5m2), "b": torch.ones(2)}, path)
    with mapped.reading_mapped_files(), modeling_utils.safe_open(path, framework="pt") as file:
        assert type(file) is safe_open and torch.equal(file.get_tensor("b"), torch.ones(2))
    assert modeling_utils.safe_open is safe_open


def test_a_disk_that_is_full_before_weights_are_written_is_one_sentence(
    tiny_checkpoint: Path, tmp_path: Path, everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match=r"^no space is left on the disk of .*out; free some, or name an output folder"):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", dtype="bfloat16")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("write", [lambda weight: weight.data.div_(2), lambda weight: weight.__setitem__(0, 1.0)])
def test_code_of_a_model_may_write_to_mapped_weights_and_the_file_stays(
    write: Callable[[Tensor], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "model.safetensors", torch.randn(3000)
    save_file({"other": torch.ones(5000), "weight": before}, path)
    tensors = map_tensors(path)
    content = path.read_bytes()
    with mapped.WritableWhereWritten(), torch.no_grad():
        write(tensors["weight"])
        write(expected := before.clone())
    monkeypatch.setattr(mapped, "_LEAST", 1)
    with scratch_folder(tmp_path):
        for tensor in tensors.values():
            give_back(tensor)
    assert torch.equal(tensors["weight"], expected) and not torch.equal(expected, before)
    assert torch.equal(tensors["other"], torch.ones(5000)) and path.read_bytes() == content
