# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint's files is told by an export, in a sentence that names it, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from helpers import export_tiny
from quantized_files import change_weights
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedConfig

from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.checkpoints.gguf.header import read_header
from optimum_neuron.checkpoints.verbatim import check_verbatim


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def refusal(checkpoint: Path, tmp_path: Path) -> Callable[..., str]:

    def refused(kind: type[Exception] = ValueError, folder: Path = checkpoint, **changes: Any) -> str:
        with pytest.raises(kind) as caught:
            export_tiny(folder, tmp_path / "out" / "artifact", **changes)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    return refused


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "bfloat16")])
def test_weights_of_no_numbers_are_named(
    value: float, dtype: str, checkpoint: Path, refusal: Callable[..., str]
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(checkpoint, lambda tensors: tensors[name][3].fill_(value))
    assert f"{name} holds NaN or infinity in 64 of 6,144 places; repair it, or download it" in refusal(dtype=dtype)


def test_one_number_that_no_probe_reaches_is_named_where_it_is_written(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    change_weights(checkpoint, lambda tensors: tensors[name][0, 0].fill_(float("nan")))  # of the token that pads
    words = f"^{name} holds NaN or infinity in 1 of 19,200 places; repair it, or download it again$"
    with pytest.raises(ValueError, match=words):
        export_tiny(checkpoint, tmp_path / "artifact")
    assert not list(tmp_path.glob("*artifact*"))


def test_logits_that_a_type_cannot_hold_are_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    change_weights(
        checkpoint, lambda tensors: [tensors[name].mul_(1e3) for name in ("model.norm.weight", "lm_head.weight")]
    )
    export_tiny(checkpoint, tmp_path / "float32")
    with pytest.raises(ValueError, match=r"its logits are not finite: its weights are, so float16 is too narrow"):
        export_tiny(checkpoint, tmp_path / "float16", dtype="float16")


@pytest.mark.parametrize("broken", ["adapter", "checkpoint"])
def test_the_tokenizer_that_is_read_is_the_one_taken_over(broken: str, checkpoint: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, adapter / name)
    (tmp_path / broken / "tokenizer.json").write_text("[]", encoding="utf-8")
    found = find_checkpoint(checkpoint, revision=None, token=None, trust_remote_code=False)
    taken = [adapter]
    if broken == "checkpoint":
        check_verbatim(found, taken)
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        check_verbatim(found, taken if broken == "adapter" else ())


def test_a_checkpoint_without_a_tokenizer_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (checkpoint / name).unlink()
    artifact = export_tiny(checkpoint, tmp_path / "artifact")
    assert not list(artifact.glob("tokenizer*"))


def test_code_of_a_tokenizer_is_not_run(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    document["auto_map"] = {"AutoTokenizer": ["tokens.Tokens", None]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    (checkpoint / "tokens.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    export_tiny(checkpoint, tmp_path / "artifact")
    assert not (tmp_path / "ran").exists()
    assert "its tokenizer is taken over unread: it needs code of the checkpoint's" in caplog.text


def test_a_link_to_nothing_is_no_missing_file(checkpoint: Path, refusal: Callable[..., str]) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to("../blobs/gone")
    assert "tokenizer.json is a link to ../blobs/gone, which does not exist" in refusal(FileNotFoundError)


def test_a_config_is_parsed_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = PreTrainedConfig.get_config_dict.__func__  # type: ignore[attr-defined]

    def get_config_dict(cls: Any, folder: str | Path, **options: Any) -> Any:
        parsed.append(str(folder))
        return parse(cls, folder, **options)

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", classmethod(get_config_dict))
    export_tiny(checkpoint, tmp_path / "artifact")
    assert parsed.count(str(checkpoint)) == 1


def test_a_header_of_a_gguf_file_is_read_as_it_was_written(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "model.gguf", "Q8_0")
    header = read_header(tmp_path / "model.gguf")
    assert header.sizes()["block_count"] == 2 and header.sizes()["attention.head_count"] == 4
    tokens = len(AutoTokenizer.from_pretrained(tiny_checkpoint).get_vocab()) + 1
    assert header.values["tokenizer.ggml.tokens"].count == tokens
    stored = load_file(tiny_checkpoint / "model.safetensors").values()
    assert (header.stored.tensors, header.stored.elements) == (len(stored), sum(tensor.numel() for tensor in stored))


def test_a_gguf_file_that_is_cut_or_changed_anywhere_is_read_or_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint, path, "Q8_0")
    whole = path.read_bytes()
    for length in (*range(0, 2000, 37), len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated or corrupt|is no GGUF file"):
            read_header(path)
    places, bits = (np.random.default_rng(0).integers(0, end, 400) for end in (12_000, 8))
    for place, bit in zip(places, bits, strict=True):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(bit)
        path.write_bytes(changed)
        try:
            read_header(path)
        except ValueError as error:
            assert str(path) in str(error)
