# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron cache lookup tells from a config alone what an export would find; on the cpu target, by stubs of plans."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import Command, flip, move_away
from helpers import export_tiny, folder_bytes, tiny_config
from hub_server import REPO, TOKEN, LoopbackHub
from moe import CONFIGS
from recurrent import SERVED
from tiny import TINY_CONFIGS, TINY_SIZES
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    CTRLConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
)

from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.spec import GraphSpec, graph_specs
from optimum_neuron.targets.cache.entries import list_entries, verify
from optimum_neuron.targets.cache.hub import sync
from optimum_neuron.targets.cache.lookup import lookup
from optimum_neuron.targets.cpu import compiler
from optimum_neuron.targets.cpu.native_library import load_kernels


Patch = pytest.MonkeyPatch
TIED = LlamaConfig(**TINY_SIZES, tie_word_embeddings=True)
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "projection_dim": 32,
}  # fmt: skip
WHOLE = {"text_config": TINY_SIZES | {"model_type": "llama"}, "vision_config": VISION}
WHOLE |= {"image_token_index": 290, "tie_word_embeddings": True}
# Its code puts a buffer of another type in the place of its own when it first runs.
REPLACED = {"vocab_size": 300, "n_positions": 256, "n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4}
INT4 = {"quantization": "int4", "quantization_zero_point": True, "quantization_exclude": ("lm_head",)}
# Of each kind of model, and the options that it is exported with; `make test-full` has the last two, which have nothing of their own.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, Any]]] = {
    "untied": (TINY_CONFIGS["llama"], {"batch_size": 1, "ctx_batch_size": 1}),
    "experts": (CONFIGS["qwen3_moe"], {"dtype": "bfloat16"}),
    "hybrid": (SERVED["nemotron_h"], {"dtype": "bfloat16", "prefill_chunk_size": 16}),
    "experts of 4 bits": (CONFIGS["qwen3_moe"], INT4),
    "replaced buffer": (lambda: CTRLConfig(**REPLACED), {"dtype": "bfloat16"}),
    "part of a whole": (lambda: LlavaConfig(**WHOLE), {}),
    "tied": (lambda: TIED, {"dtype": "auto"}),
    "transposed experts": (CONFIGS["gpt_oss"], {"output_logits": False, "kv_block_size": 64}),
}  # fmt: skip
# Each changes a graph at least.
CHANGES: dict[str, Any] = {
    "batch_size": 4, "ctx_batch_size": 1, "sequence_length": 128, "prefill_chunk_size": 16, "prefill_chunk_buckets": (4,),
    "context_buckets": (32, 64), "kv_block_size": 64, "dtype": "bfloat16", "output_logits": False, "quantization": "fp8",
}  # fmt: skip
OTHER_MODELS = {"rms_norm_eps": 1e-3, "tie_word_embeddings": True, "num_hidden_layers": 1, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    """Those of the other tests, which a cache of a test's own would build anew."""
    load_kernels()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of graphs for which a plan was to be made; none is."""
    names: list[str] = []

    def make_none(model: object, states: object, spec: GraphSpec, job: object, scratch: Path) -> None:
        names.append(spec.name)
        (scratch / f"{spec.name}.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(compiler, "_compile_graph", make_none)
    return names


def make(folder: Path, config: PreTrainedConfig) -> Path:
    """A checkpoint, whose config names its type."""
    auto = AutoModelForMultimodalLM if isinstance(config, LlavaConfig) else AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def states(checkpoint: Path, config: NeuronConfig, **options: Any) -> dict[str, str]:
    return {each.graph: each.here for each in lookup(checkpoint, config, **options)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (at > 5)) for at, name in enumerate(MODELS)]
)
def test_what_is_looked_for_is_what_an_export_stores(
    name: str, root: Path, compiled: list[str], tmp_path: Path
) -> None:
    make_config, options = MODELS[name]
    checkpoint = make(tmp_path / "checkpoint", make_config())
    alone = tmp_path / "config"
    alone.mkdir()
    shutil.copy(checkpoint / "config.json", alone)
    config = tiny_config(target="cpu", **options)
    before = states(alone, config)
    assert set(before.values()) == {"missing"} and not root.exists() and not compiled
    export_tiny(checkpoint, tmp_path / "artifact", target="cpu", **options)
    assert sorted(compiled) == sorted(before) == sorted(spec.name for spec in graph_specs(config))
    found = lookup(alone, config)
    assert {each.here for each in found} == {"there"}
    assert {each.key for each in found} == {entry.path.name for entry in list_entries()}
    other = lookup(alone, replace(config, batch_size=4, mixed_step=None, prefill_chunk_size=None))
    assert "there" not in {each.here for each in other}


def test_whatever_changes_a_graph_or_a_model_is_looked_for_anew_where_only_its_user_can_write(
    root: Path, compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu")
    known = {each.key for each in lookup(tiny_checkpoint, tiny_config(target="cpu"))}
    for option, value in CHANGES.items():
        found = lookup(tiny_checkpoint, tiny_config(target="cpu", **{"context_buckets": None} | {option: value}))
        new = [each for each in found if each.key not in known]
        assert new and {each.here for each in new} == {"missing"}, option
        assert all(each.here == "there" for each in found if each.key in known)
    # What changes none: where states are kept beside the graphs. And to look is no use of an entry.
    for entry in list_entries():
        os.utime(entry.path / "entry.json", (1e9, 1e9))
    assert {each.key for each in lookup(tiny_checkpoint, tiny_config(target="cpu", state_snapshots=0))} == known
    assert {entry.last_use for entry in list_entries()} == {1e9}
    for change in OTHER_MODELS.items():
        shutil.copy(tiny_checkpoint / "config.json", tmp_path)
        edit(tmp_path, **dict([change]))
        assert set(states(tmp_path, tiny_config(target="cpu")).values()) == {"missing"}, change
    (root / "cpu").chmod(0o777)
    with pytest.raises(PermissionError, match="can be changed by other users"):
        lookup(tiny_checkpoint, tiny_config(target="cpu"))


def test_an_entry_that_is_broken_is_not_there_and_stays(
    root: Path, compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu")
    first, second, third = (entry.path for entry in list_entries())
    flip(first / "code.json")
    # whole, and of no use for this target
    (second / "code.json").rename(second / "code.so")
    (second / "entry.json").write_text((second / "entry.json").read_text().replace(".json", ".so"), encoding="utf-8")
    before = folder_bytes(root)
    found = {each.key: each.here for each in lookup(tiny_checkpoint, tiny_config(target="cpu"))}
    assert found == {first.name: "broken", second.name: "broken", third.name: "there"}
    assert folder_bytes(root) == before
    del compiled[:]
    export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", overwrite=True)
    assert len(compiled) == 2
    assert set(states(tiny_checkpoint, tiny_config(target="cpu")).values()) == {"there"}


ONE_ROW: dict[str, Any] = {"batch_size": 1, "ctx_batch_size": 1, "output_logits": False}
COMMAND = ("--target", "cpu", "--sequence-length", "64", "--prefill-chunk-size", "8")


def test_the_second_machine_compiles_nothing(
    hub: LoopbackHub, root: Path, compiled: list[str], tiny_checkpoint: Path, monkeypatch: Patch, command: Command
) -> None:
    """The first machine makes and shares plans, the second one finds that all are there, and makes none."""
    words = ("--model", str(tiny_checkpoint), *COMMAND)
    shared = (*words, "--repo", REPO)
    code, out, err = command("lookup", *shared)
    assert code == 3 and out.endswith(f"0 in {root}, 0 in {REPO}; 2 to be compiled\n"), err
    first = export_tiny(tiny_checkpoint, root.parent / "first", target="cpu", **ONE_ROW)
    assert len(compiled) == len(sync(REPO, token=TOKEN).uploaded) == 2
    code, out, _ = command("lookup", *shared)
    assert code == 0 and out.endswith(f"2 in {root}, 2 in {REPO}; 0 to be compiled\n")
    second = move_away(monkeypatch)
    assert command("lookup", *words)[0] == 3
    code, out, _ = command("lookup", *shared)
    assert code == 0 and out.endswith(f"0 in {second}, 2 in {REPO}; 0 to be compiled\n")
    assert len(re.findall(r"│ *missing *│ *there *│", out)) == 2 and "token_generation" in out
    assert len(sync(REPO, upload=False).downloaded) == 2
    assert command("lookup", *words)[0] == 0
    assert all(problem is None for _, problem in verify(remove=False))
    again = export_tiny(tiny_checkpoint, root.parent / "second", target="cpu", **ONE_ROW)
    assert len(compiled) == 2
    assert folder_bytes(again / "graphs") == folder_bytes(first / "graphs")


def test_a_repository_gives_a_model_without_its_weights_and_entries_by_the_names_of_their_files(
    hub: LoopbackHub, root: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(target="cpu")
    first, second, third = (each.key for each in lookup(tiny_checkpoint, config))
    hub.files.update(folder_bytes(tiny_checkpoint))
    for key, files in (
        (first, ("entry.json", "code.json")),
        (second, ("entry.json", "code.so")),
        (third, ("code.json",)),
    ):
        hub.files.update({f"cpu/{key}/{name}": b"{}" for name in files})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = {each.key: each.shared for each in lookup(REPO, config, repo=REPO)}
    assert found == {first: "there", second: "broken", third: "missing"}
    assert hub.asked("GET", "config.json") and not hub.asked("GET", "safetensors") + hub.asked("GET", "entry.json")


def edit(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
    return folder


def with_index(folder: Path) -> Path:
    names = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], str]] = {
    "no dtype": (lambda folder: edit(folder, dtype=None), (), "its config names no dtype, and its weights are not read; give --dtype"),
    "ties that weights deny": (
        lambda folder: with_index(edit(folder, tie_word_embeddings=True)), (), "lm_head.weight is model.embed_tokens.weight, and its files hold both",
    ),
    "another length": (Path, ("--sequence-length", "512"), "max_position_embeddings=256; lower --sequence-length"),
    "no compiler": (Path, ("--target", "eager"), "target='eager' compiles nothing that is kept"),
    "an adapter": (Path, ("--adapter", "lora"), "--adapter lora changes weights"),
    "ranks": (Path, ("--tensor-parallel-size", "2"), "tensor_parallel_size=2 needs as many devices"),
    "a revision of nothing": (Path, ("--repo-revision", "v1"), "--repo-revision v1 needs a repository; name it by --repo"),
    "codes": (Path, ("--quantization", "checkpoint"), "quantization='checkpoint' gives weights types that only a checkpoint's files have"),
    "idle exclusion": (
        Path, ("--quantization", "int8", "--quantization-exclude", "no.such"), "quantization_exclude='no.such' is the name of none",
    ),
    "no model": (lambda folder: edit(folder, hidden_act="zzz"), (), "no llama model can be built by its config"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_one_sentence(
    name: str, root: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    change, words, told = REFUSED[name]
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    folder = change(tmp_path)
    words = ("--target", "cpu", "--sequence-length", "64", *words)
    code, out, err = command("lookup", "--model", str(folder), *words)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and out == "" and told in line
    assert not root.exists()


def test_ties_that_weights_do_not_deny_are_no_question(root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Where the config ties nothing, or no name is there twice, an index of weights asks nothing."""
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    lookup(with_index(tmp_path), tiny_config(target="cpu"))
    index = with_index(edit(tmp_path, tie_word_embeddings=True)) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a.safetensors"}}), encoding="utf-8")
    lookup(tmp_path, tiny_config(target="cpu"))


def test_a_file_of_weights_is_refused(root: Path, smollm2_gguf: Path) -> None:
    with pytest.raises(ValueError, match=r"\.gguf has its config in one file with its weights, which are not read"):
        lookup(smollm2_gguf, tiny_config(target="cpu"))
