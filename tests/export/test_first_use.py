# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in the place of an artifact: exported into the cache on first use, once, and found there afterwards."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
from gguf_files import write_gguf
from helpers import export_tiny
from hub_server import put_in_hub_cache
from optimum.commands import optimum_cli
from safetensors.torch import load_file, save_file

from optimum_neuron import targets
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.partial import locked_folder
from optimum_neuron.config import ExportOptions
from optimum_neuron.export import first_use
from optimum_neuron.export import recipe as export
from optimum_neuron.export.first_use import open_or_export


ANSWER = ("--prompt", "Hello", "--max-new-tokens", "4")


@pytest.fixture(autouse=True)
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of exports for the target that compiles nothing."""
    monkeypatch.setattr(first_use, "cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(targets, "resolve_target", lambda target: "eager" if target == "auto" else target)
    (tmp_path / first_use.CACHE_KIND).mkdir()
    return tmp_path / first_use.CACHE_KIND


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["optimum-cli", *map(str, words)])
    optimum_cli.main()


def opened(model: str | Path, **sizes: int) -> Artifact:
    return open_or_export(str(model), ExportOptions(), sizes).artifact


def test_a_checkpoint_answers_after_one_export_with_sizes_of_its_own(
    tiny_checkpoint: Path, exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "neuron", "generate", tiny_checkpoint, *ANSWER)
    first = capsys.readouterr()
    (folder,) = (path for path in exports.iterdir() if (path / "neuron_config.json").is_file())
    (told,) = [line for line in first.err.splitlines() if line.startswith("[optimum_neuron]")]
    words = "is a checkpoint: exporting it once, for 4 requests of up to 256 tokens, to"
    assert f"{tiny_checkpoint} {words} {folder};" in told
    run(monkeypatch, "neuron", "generate", tiny_checkpoint, *ANSWER)
    second = capsys.readouterr()
    assert second.out == first.out and "exporting" not in second.err and list(exports.iterdir()) == [folder]


def test_the_command_that_is_told_exports_the_same_artifact(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "optimum_neuron.export.first_use"):
        made = opened(tiny_checkpoint, batch_size=2)
    command = caplog.messages[0].partition("for other options: ")[2]
    run(monkeypatch, *[word.replace("OUT", str(tmp_path / "out")) for word in shlex.split(command)[1:]])
    assert Artifact.open(tmp_path / "out").config == made.config
    assert (made.config.batch_size, made.config.sequence_length, made.config.output_logits) == (2, 256, True)


def test_an_error_about_options_tells_a_command(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError(problem)

    monkeypatch.setattr(export, "export_model", refuse)
    command = f"optimum-cli export neuron OUT --model {tiny_checkpoint}"
    for problem in ("pass --dequantize", "lower --batch-size"):
        with pytest.raises(ValueError, match=problem) as refused:
            opened(tiny_checkpoint)
        assert (command in str(refused.value)) is (problem == "pass --dequantize")


def test_a_gguf_file_answers(
    tiny_checkpoint: Path, tmp_path: Path, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tiny_checkpoint, tmp_path / "model.gguf", "F16")
    run(monkeypatch, "neuron", "generate", tmp_path / "model.gguf", *ANSWER)
    made = opened(tmp_path / "model.gguf")
    assert made.config.dtype == "bfloat16"
    # Another file in its folder is none of its own.
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert opened(tmp_path / "model.gguf").path == made.path


def test_a_commit_names_a_repository(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = put_in_hub_cache(tiny_checkpoint, "someone/tiny", tmp_path / "hub")
    made = opened("someone/tiny")
    assert made.path.name.startswith("tiny-")
    for path in snapshot.iterdir():
        path.touch()  # as a download into another cache does
    assert opened("someone/tiny").path == made.path
    assert opened("someone/tiny", batch_size=2).path != made.path
    write_gguf(tiny_checkpoint, snapshot / "small.gguf", "F16")
    assert opened("someone/tiny:small.gguf").path.name.startswith("small.gguf-")


def test_an_edited_checkpoint_is_exported_anew_and_a_damaged_export_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "edited"))
    before = opened(folder)
    weights = before.file("weights/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert opened(folder).path == before.path and weights.read_bytes() == whole
    tensors = load_file(folder / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    after = opened(folder)
    assert after.path != before.path and after.file("weights/model.safetensors").read_bytes() != whole
    # One that is a link is not run.
    after.path.rename(tmp_path / "elsewhere")
    after.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is a link, which may lead out of the cache; remove it"):
        opened(folder)


def test_those_who_ask_together_export_once_and_wait(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, entered = threading.Event(), locked_folder

    def seen(folder: Path, *, wait: bool = False) -> object:
        if wait and folder.name.endswith(".awaited"):
            waits.set()
        return entered(folder, wait=wait)

    open_artifact = first_use.Artifact.open

    def slow(path: Path) -> Artifact:
        waits.wait(30)  # the lock is held until another one waits for it
        return open_artifact(path)

    monkeypatch.setattr(first_use, "locked_folder", seen)
    monkeypatch.setattr(first_use.Artifact, "open", slow)
    with caplog.at_level(logging.WARNING, "optimum_neuron.export.first_use"), ThreadPoolExecutor(2) as threads:
        paths = {each.path for each in threads.map(opened, [tiny_checkpoint] * 2)}
    assert len(paths) == 1
    assert sorted("exporting" in line for line in caplog.messages) == [False, True]
    assert any("is exported by another process; waiting for it" in line for line in caplog.messages)


def test_an_artifact_keeps_its_sizes(tiny_checkpoint: Path, tmp_path: Path, exports: Path) -> None:
    artifact = export_tiny(tiny_checkpoint, tmp_path / "artifact")
    assert opened(artifact).path == artifact
    with pytest.raises(ValueError, match=r"batch_size=7 differs from the 3 that .* was exported with"):
        opened(artifact, batch_size=7)
    assert not list(exports.iterdir())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("folder", "holds neither neuron_config.json (an artifact) nor config.json (a checkpoint); name an artifact"),
        ("files", "files holds GGUF files; name one of them, as files/one.gguf"), ("C:model.gguf", "C:model.gguf does not exist"),
        (r"C:\models\tiny", r"C:\models\tiny does not exist; name an artifact"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_told_with_the_right(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.gguf").touch()
    with pytest.raises((FileNotFoundError, ValueError)) as refused:
        opened(name)
    assert told in str(refused.value)
