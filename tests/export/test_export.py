# SPDX-License-Identifier: Apache-2.0
"""An export appears whole or not at all, follows the checkpoint's defaults of generation, and refuses by one clear sentence."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import export_tiny, folder_bytes, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import optimum_neuron.export.recipe
from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.artifact import filesystem
from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME, Artifact
from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.files import INDEX_NAME
from optimum_neuron.targets.eager import EagerTarget
from optimum_neuron.targets.neuron.sdk import devices
from optimum_neuron.text.tokenizer import RECORD_NAME


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "artifact"


def test_an_artifact_holds_the_checkpoint_files_and_complete_records(tiny_checkpoint: Path, output: Path) -> None:
    returned = export_tiny(tiny_checkpoint, output, dtype="auto", context_buckets=None)
    artifact = Artifact.open(returned)
    artifact.verify()
    assert returned == output and names(output.parent) == ["artifact"]
    verbatim = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    made = {"tokenizer_config.json", RECORD_NAME, MANIFEST_NAME, WEIGHTS_NAME, INDEX_NAME}
    assert set(folder_bytes(output)) == verbatim | made
    assert all((output / name).read_bytes() == (tiny_checkpoint / name).read_bytes() for name in verbatim)
    ours, theirs = (json.loads((each / "tokenizer_config.json").read_bytes()) for each in (output, tiny_checkpoint))
    assert ours == theirs | {"model_max_length": 64}
    assert artifact.config == tiny_config(dtype="float32")
    manifest = json.loads((output / MANIFEST_NAME).read_text(encoding="utf-8"))
    assert manifest["source"] == str(tiny_checkpoint) and manifest["task"] == "text-generation"
    assert manifest["versions"]["torch"] == torch.__version__
    graph = manifest["graphs"]["token_generation_context64"]
    assert graph["inputs"][0] == {"name": "decode.input_ids", "shape": [3, 1], "dtype": "int32"}
    assert graph["outputs"][1] == {"name": "decode.logits", "shape": [3, 300], "dtype": "float32"}
    assert graph["kind"] == "token_generation" and graph["context_length"] == 64


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("graph x could not be compiled"), SystemExit(143)]
)
def test_an_interrupted_export_leaves_nothing_or_the_old_artifact(
    tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(EagerTarget, "compile", fail_with(error))
        export_tiny(tiny_checkpoint, output)
    assert names(output.parent) == []
    before = folder_bytes(export_tiny(tiny_checkpoint, output))
    monkeypatch.setattr(EagerTarget, "compile", fail_with(error))
    with pytest.raises(FileExistsError, match=r"already holds an artifact; pass --overwrite"):
        export_tiny(tiny_checkpoint, output, batch_size=2)
    with pytest.raises(type(error)):
        export_tiny(tiny_checkpoint, output, overwrite=True)
    assert folder_bytes(output) == before and names(output.parent) == ["artifact"]


def test_a_default_length_is_lowered_to_the_positions_of_the_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    positions = json.loads((tiny_checkpoint / "config.json").read_bytes())["max_position_embeddings"]
    assert positions < NeuronConfig.sequence_length
    for name, options in (("plain", {}), ("rows", {"batch_size": 4})):
        export_model(tiny_checkpoint, tmp_path / name, config=NeuronConfig(target="eager", **options))
        config = Artifact.open(tmp_path / name).config
        wanted = {"target": "eager", "sequence_length": positions, "dtype": "float32", "activations": None}
        assert config == NeuronConfig(**wanted | options)
    words = f"sequence_length=1024 is longer than the model's max_position_embeddings={positions}"
    with pytest.raises(ValueError, match=words):
        export_model(tiny_checkpoint, tmp_path / "asked", config=NeuronConfig(target="eager", sequence_length=1024))


def test_a_full_disk_is_seen_in_time(tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
    with pytest.raises(OSError, match=r"needs about 0\.1 GB, and .* has 0\.1 GB free; free some space"):
        export_tiny(tiny_checkpoint, output)
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 1), ({"dtype": "bfloat16"}, 1), ({"quantization": "int8"}, 0.5)],
    ids=["as it is", "cast", "rounded to codes"],
)
def test_a_disk_without_room_is_refused_before_a_weight_is_read(
    tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], times: float
) -> None:
    """Of float32: as much for the artifact alone, a half each for an artifact of bfloat16 and what is cast, a fourth of codes."""
    size = sum(each.nbytes for each in load_file(tiny_checkpoint / "model.safetensors").values())
    monkeypatch.setattr(filesystem, "_MARGIN", 0)
    monkeypatch.setattr(Checkpoint, "load_model", fail_with(RuntimeError("weights are read")))
    for free, error in ((size * times * 0.97, OSError), (size * times * 1.03, RuntimeError)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(error):
            export_tiny(tiny_checkpoint, output, **options)
        assert not output.parent.exists()


@pytest.mark.parametrize("route", ["export_model", "from_pretrained"])
def test_sizes_follow_the_target(
    route: str, tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[NeuronConfig] = []

    class Device:
        def check(self, config: NeuronConfig) -> None:
            checked.append(config)
            raise RuntimeError("as far as this test goes")

    monkeypatch.setattr(devices, "find_devices", lambda: devices.NeuronDevices("trn2", 1, 8))
    monkeypatch.setattr(optimum_neuron.export.recipe, "get_target", lambda name: Device())
    with pytest.raises(RuntimeError, match="as far as"):
        if route == "export_model":
            export_model(tiny_checkpoint, output, config=NeuronConfig(sequence_length=1024))
        else:
            NeuronModelForCausalLM.from_pretrained(tiny_checkpoint, export=True, sequence_length=1024)
    assert checked == [NeuronConfig(sequence_length=1024, target="trn2")]
    assert checked[0].context_buckets == (256, 1024)


def test_options_that_do_not_fit_and_a_certifier_that_is_no_function_are_refused(
    tiny_checkpoint: Path, output: Path
) -> None:
    for changes, words in (
        ({"state_snapshots": 4}, "=4 is for state that slots keep, and those of LlamaForCausalLM keep keys"),
        ({"state_snapshot_interval": 64}, "=64 is for state .* leave state_snapshot_interval out"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            export_tiny(tiny_checkpoint, output, **changes)
        assert "\n" not in str(caught.value)
    told = r"certify=True is no function; pass optimum_neuron\.tools\.certify\.certify_export"
    with pytest.raises(TypeError, match=told):
        export_model(tiny_checkpoint, output, certify=True)  # type: ignore[arg-type]  # as a user may
    assert not output.parent.exists()


@pytest.fixture
def checkpoint(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharp_checkpoints["llama"], tmp_path / "checkpoint"))


def export(checkpoint: Path, facts: dict[str, Any]) -> Path:
    (checkpoint / "generation_config.json").write_text(json.dumps(facts))
    return export_tiny(checkpoint, checkpoint.with_name("artifact"), output_logits=False)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"do_sample": True, "repetition_penalty": 1.05, "top_k": 20, "temperature": 0.7, "top_p": 0.8}, "repetition_penalty=1.05"),
        ({"no_repeat_ngram_size": 3, "min_new_tokens": 2, "eos_token_id": 2}, "no_repeat_ngram_size=3"),
        ({"min_new_tokens": 2, "eos_token_id": 2}, "min_new_tokens=2"),
        ({"bad_words_ids": [[5]]}, r"bad_words_ids=\[\[5\]\]"),
        ({"suppress_tokens": list(range(200))}, r"suppress_tokens=\[0, 1, 2, .*\.\.\., applied"),
        ({"typical_p": 0.9}, "typical_p=0.9"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    ],
)  # fmt: skip
def test_graphs_return_logits_where_the_file_needs_them(
    checkpoint: Path, facts: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = export(checkpoint, facts)
    assert len([each for each in caplog.messages if "as with --output-logits" in each]) == 1
    caplog.clear()
    assert Artifact.open(path).config.output_logits
    model = NeuronModelForCausalLM.from_pretrained(path, output_logits=False)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[40, 41, 42, 40, 41, 42]])
    how = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": False}
    tokens, expected = (each.generate(ids, **how) for each in (model, reference))
    assert torch.equal(tokens, expected)
    assert model.generate_batch(ids.tolist())["req_0"].error is None
    same = NeuronConfig.from_dict(Artifact.open(path).config.to_dict() | {"output_logits": False})
    NeuronModelForCausalLM.from_pretrained(path, config=same)


@pytest.mark.parametrize(
    "facts",
    [
        {"do_sample": True, "temperature": 0.6, "top_k": 64, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.0},
        {"typical_p": 1.0, "epsilon_cutoff": 0.0, "no_repeat_ngram_size": 0, "temperature": 0.0, "top_k": -1, "use_cache": False},
        {"max_time": 60.0, "stop_strings": ["\u0000"]},
        {"max_new_tokens": 9999, "pad_token_id": -1, "eos_token_id": [2, 400], "max_window_size": 24000, "cache_implementation": "hybrid"},
    ],
)  # fmt: skip
def test_followed_files_need_no_logits(
    checkpoint: Path, facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        path = export(checkpoint, facts)
    assert not Artifact.open(path).config.output_logits and "generation_config" not in caplog.text
    model = NeuronModelForCausalLM.from_pretrained(path)
    assert model.generate(torch.tensor([[5, 6], [7, 8]])).shape[1] > 2


def test_what_no_artifact_does_is_said_and_refuses_no_call(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = {"num_beams": 4, "penalty_alpha": 0.6, "guidance_scale": 1.5, "output_attentions": True}
    path = export(checkpoint, facts | {"num_return_sequences": 4, "do_sample": True})
    told = "\n".join(caplog.messages)
    for name, value in facts.items():
        assert f"generation_config.json asks for {name}={value}, which is left out: " in told
    assert "num_return_sequences=4, which is left out: it needs do_sample and batch_size=4" in told
    caplog.clear()
    model = NeuronModelForCausalLM.from_pretrained(path)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    assert model.generate_batch([[5, 6]], max_new_tokens=3)["req_0"].error is None
    assert "left out" not in caplog.text
    with pytest.raises(ValueError, match="num_beams=4 is not supported: compiled graphs advance one sequence per row"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, num_beams=4, do_sample=False)


@pytest.mark.parametrize("facts", [{"repetition_penalty": -1.0}, {"do_sample": True, "min_p": 1.5}, {"top_k": 0.5}])
def test_a_value_that_transformers_refuses_is_refused_by_the_export(checkpoint: Path, facts: dict[str, Any]) -> None:
    (name,) = facts.keys() - {"do_sample"}
    with pytest.raises(ValueError, match=rf"generation_config.json has {name}=.*; correct or remove it"):
        export(checkpoint, facts)
    assert not checkpoint.with_name("artifact").exists()
