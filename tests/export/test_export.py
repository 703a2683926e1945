# SPDX-License-Identifier: Apache-2.0
"""An export appears whole or not at all, never harms what was there, and refuses by one clear sentence."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, folder_bytes, generate, random_tokens, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, T5Config

import optimum_neuron.export.recipe
from optimum_neuron import NeuronModelForCausalLM, export_model
from optimum_neuron.artifact import disk_space, weight_file
from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME, Artifact
from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.files import INDEX_NAME
from optimum_neuron.config import NEURON_TARGETS, NeuronConfig
from optimum_neuron.targets.eager import EagerTarget
from optimum_neuron.targets.neuron.sdk import devices
from optimum_neuron.text.record import RECORD_NAME


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
    assert set(folder_bytes(output)) == verbatim | {
        "tokenizer_config.json",
        RECORD_NAME,
        MANIFEST_NAME,
        WEIGHTS_NAME,
        INDEX_NAME,
    }
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


def test_weights_take_the_type_that_was_asked_for(tiny_checkpoint: Path, output: Path) -> None:
    artifact = Artifact.open(export_tiny(tiny_checkpoint, output, dtype="bfloat16"))
    assert artifact.config.dtype == "bfloat16"
    with safe_open(output / WEIGHTS_NAME, "pt") as weights:
        assert weights.get_tensor("model.lm_head.weight").dtype == torch.bfloat16
    assert len(generate(artifact_runner(output), random_tokens(5), 3)[0]) == 3


def test_tied_weights_are_stored_once(tiny_checkpoints: dict[str, Path], output: Path) -> None:
    artifact = Artifact.open(export_tiny(tiny_checkpoints["gemma2"], output))
    assert "model.lm_head.weight" in {*artifact.tied_weights, *artifact.tied_weights.values()}
    with safe_open(output / WEIGHTS_NAME, "pt") as weights:
        stored = set(weights.keys())
    assert stored.isdisjoint(artifact.tied_weights) and stored.issuperset(artifact.tied_weights.values())
    assert len(stored & {"model.lm_head.weight", "model.model.embed_tokens.weight"}) == 1


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
    with pytest.raises(type(error)):
        export_tiny(tiny_checkpoint, output, overwrite=True)
    assert folder_bytes(output) == before and names(output.parent) == ["artifact"]


def test_an_existing_artifact_is_kept_unless_it_may_be_replaced(tiny_checkpoint: Path, output: Path) -> None:
    before = folder_bytes(export_tiny(tiny_checkpoint, output))
    with pytest.raises(FileExistsError, match=r"already holds an artifact; pass --overwrite"):
        export_tiny(tiny_checkpoint, output, batch_size=2)
    assert folder_bytes(output) == before
    export_tiny(tiny_checkpoint, output, batch_size=2, overwrite=True)
    assert Artifact.open(output).config.batch_size == 2
    assert names(output.parent) == ["artifact"]


def test_a_full_disk_is_seen_before_anything_is_written(
    tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
    with pytest.raises(OSError, match=r"needs about 0\.1 GB, and .* has 0\.1 GB free; free some space"):
        export_tiny(tiny_checkpoint, output)
    assert not output.parent.exists()


def test_a_default_length_is_lowered_to_the_positions_of_the_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    positions = json.loads((tiny_checkpoint / "config.json").read_bytes())["max_position_embeddings"]
    assert positions < NeuronConfig.sequence_length
    for name, options in (("plain", {}), ("rows", {"batch_size": 4})):
        export_model(tiny_checkpoint, tmp_path / name, config=NeuronConfig(target="eager", **options))
        config = Artifact.open(tmp_path / name).config
        assert config == NeuronConfig(
            target="eager", sequence_length=positions, dtype="float32", activations=None, **options
        )
    with pytest.raises(
        ValueError, match=f"sequence_length=1024 is longer than the model's max_position_embeddings={positions}"
    ):
        export_model(tiny_checkpoint, tmp_path / "asked", config=NeuronConfig(target="eager", sequence_length=1024))


def test_a_killed_export_is_made_again_to_the_same_bytes(
    tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = folder_bytes(export_tiny(tiny_checkpoint, output.with_name("other")))
    work, write, written = output.with_name(".artifact.partial"), weight_file.tensor_bytes, itertools.count()

    def die(tensor: torch.Tensor) -> memoryview:
        if next(written) == 5:
            shutil.copytree(work, output.with_name("left"))
            raise KeyboardInterrupt
        return write(tensor)

    with monkeypatch.context() as context:
        context.setattr(weight_file, "tensor_bytes", die)
        with pytest.raises(KeyboardInterrupt):
            export_tiny(tiny_checkpoint, output)
    output.with_name("left").rename(work)
    export_tiny(tiny_checkpoint, output)
    assert folder_bytes(output) == expected and names(output.parent) == ["artifact", "other"]


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 1), ({"dtype": "bfloat16"}, 1), ({"quantization": "int8"}, 0.5)],
    ids=["as it is", "cast", "rounded to codes"],
)
def test_a_disk_without_room_for_what_is_made_meanwhile_is_seen_before_a_weight_is_read(
    tiny_checkpoint: Path, output: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], times: float
) -> None:
    """Of float32: as much for the artifact alone, a half each for an artifact of bfloat16 and what is cast, a fourth of codes."""
    size = sum(each.nbytes for each in load_file(tiny_checkpoint / "model.safetensors").values())
    monkeypatch.setattr(disk_space, "_MARGIN", 0)
    monkeypatch.setattr(Checkpoint, "load_model", fail_with(RuntimeError("weights are read")))
    for free, error in ((size * times * 0.97, OSError), (size * times * 1.03, RuntimeError)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(error):
            export_tiny(tiny_checkpoint, output, **options)
        assert not output.parent.exists()


def broken_checkpoint(kind: str, folder: Path) -> Path:
    folder.mkdir()
    config = LlamaConfig(max_position_embeddings=32).to_dict()
    documents = {
        "no config": None,
        "corrupt config": "{",
        "encoder-decoder": T5Config().to_json_string(),
        "quantized": json.dumps(
            config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        ),
        "unknown model": json.dumps({"model_type": "nonesuch"}),
        "no model type": "{}",
        "short": json.dumps(config),
        "no weights": json.dumps(config | {"max_position_embeddings": 64}),
    }
    if documents[kind] is not None:
        (folder / "config.json").write_text(documents[kind], encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("no config", FileNotFoundError, r"holds no config.json; name a checkpoint folder, a .gguf file or a Hub"),
        ("corrupt config", ValueError, r"config.json is not valid JSON"),
        ("encoder-decoder", ValueError, r"is an encoder-decoder \(t5\); only decoders can be exported"),
        ("quantized", ValueError, r"by bitsandbytes, which is not read; export the checkpoint that it was made from"),
        ("unknown model", ValueError, r"checkpoint: .*`nonesuch`"),
        ("no model type", ValueError, r"checkpoint: .*model_type"),
        ("short", ValueError, r"sequence_length=64 is longer than the model's max_position_embeddings=32; lower"),
        ("no weights", OSError, r"model.safetensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_exported_is_refused_with_the_reason(
    tmp_path: Path, output: Path, kind: str, error: type[Exception], words: str
) -> None:
    checkpoint = broken_checkpoint(kind, tmp_path / "checkpoint")
    with pytest.raises(error, match=words) as caught:
        export_tiny(checkpoint, output)
    assert "\n" not in str(caught.value)
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-owner/no-such-model", r"no-such-model is no local path, .* \(HF_HUB_OFFLINE is set\)"),
        ("./no/such/folder", r"\./no/such/folder is neither a local path nor a Hub repository"),
        ("/no/such/model.gguf", r"/no/such/model.gguf does not exist"),
    ],
)
def test_a_checkpoint_that_does_not_exist_is_not_found(output: Path, name: str, words: str) -> None:
    with pytest.raises(FileNotFoundError, match=words) as caught:
        export_model(name, output, config=tiny_config())
    assert "\n" not in str(caught.value)
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length": 257, "context_buckets": None}, r"=257 is longer .* max_position_embeddings=256"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 needs as many devices, and target='eager' is one"),
        ({"tensor_parallel_size": 2, "target": "cpu"}, r"=2 needs as many devices, and target='cpu'"),
        ({"state_snapshots": 4}, "=4 is for state that slots keep, and those of LlamaForCausalLM keep keys"),
        ({"state_snapshot_interval": 64}, "=64 is for state .* leave state_snapshot_interval out"),
    ],
)
def test_options_that_this_machine_cannot_honor_are_refused(
    tiny_checkpoint: Path, output: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        export_tiny(tiny_checkpoint, output, **changes)
    assert "\n" not in str(caught.value)
    assert not output.parent.exists()


@pytest.mark.parametrize("target", NEURON_TARGETS)
def test_a_device_target_names_what_compiling_lacks(tiny_checkpoint: Path, output: Path, target: str) -> None:
    with pytest.raises(RuntimeError, match=r"needs? (torch-xla|the Neuron compiler), .*; "):
        export_tiny(tiny_checkpoint, output, target=target)
    assert not output.parent.exists()


@pytest.mark.parametrize("route", ["export_model", "from_pretrained"])
def test_sizes_follow_the_target_that_auto_stands_for(
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


def test_a_certifier_that_is_no_function_is_refused(tiny_checkpoint: Path, output: Path) -> None:
    with pytest.raises(
        TypeError, match=r"certify=True is no function; pass optimum_neuron\.tools\.certify\.certify_export"
    ):
        export_model(tiny_checkpoint, output, certify=True)  # type: ignore[arg-type]  # as a user may
    assert not output.exists()
