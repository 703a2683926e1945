# SPDX-License-Identifier: Apache-2.0
"""What an export for a Neuron device would find compiled, told without weights: the same keys, and no call of the compiler."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import call, move_away
from fakes.tools import NeuronTools
from helpers import export_tiny, folder_bytes, tiny_config
from hub_server import REPO, TOKEN, connected_hub
from moe import CONFIGS
from recurrent import SERVED
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from optimum_neuron.targets.cache.entries import list_entries
from optimum_neuron.targets.cache.hub import sync
from optimum_neuron.targets.cache.lookup import lookup
from optimum_neuron.targets.neuron.compile.neuron_cc import compiler_version


pytest_plugins = ("fakes.plugin",)
SIZES: dict[str, Any] = {"target": "trn2", "batch_size": 1, "ctx_batch_size": 1, "output_logits": False}
# Of each kind of model, and the options that it is exported with.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, Any]]] = {
    "tied codes on two ranks": (
        lambda: LlamaConfig(**TINY_SIZES, tie_word_embeddings=True),
        {"tensor_parallel_size": 2, "float32_reduce": True, "dtype": "bfloat16", "quantization": "int8"},
    ),
    "experts": (CONFIGS["qwen3_moe"], {"dtype": "bfloat16", "output_logits": True}),
    "hybrid": (SERVED["lfm2"], {"prefill_chunk_size": 16}),
}


@pytest.fixture(autouse=True)
def fresh_answers() -> None:
    """What a compiler said once is remembered by its path, which tests use again."""
    compiler_version.cache_clear()


def keys(model: Path, **options: Any) -> dict[str, str]:
    """Those that are looked for, by whether they are there."""
    return {each.key: each.here for each in lookup(model, tiny_config(**SIZES | options))}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_looked_for_is_what_an_export_stores(name: str, neuron_tools: NeuronTools, tmp_path: Path) -> None:
    make_config, options = MODELS[name]
    model = AutoModelForCausalLM.from_config(make_config(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "checkpoint" / "config.json", tmp_path / "alone")
    before = keys(tmp_path / "alone", **options)
    assert set(before.values()) == {"missing"} and not neuron_tools.calls() and not (tmp_path / "cache").exists()
    export_tiny(tmp_path / "checkpoint", tmp_path / "artifact", **SIZES | options)
    assert keys(tmp_path / "alone", **options) == dict.fromkeys(before, "there")
    assert {entry.path.name for entry in list_entries()} == set(before)
    assert len(neuron_tools.calls()) == len(before)


CHANGES: dict[str, Any] = {"dtype": "bfloat16", "target": "trn1"}
VARIABLES = {"NEURON_CC_FLAGS": "-O3", "NEURON_LOGICAL_NC_CONFIG": "1", "FAKE_NCC_VERSION": "2.28.1.0+1"}


def test_whatever_changes_a_graph_or_its_compilation_is_looked_for_anew(
    neuron_tools: NeuronTools, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = keys(tiny_checkpoint).keys()
    for option, value in CHANGES.items():
        assert keys(tiny_checkpoint, **{option: value}).keys() - known, option
    for name, value in VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            compiler_version.cache_clear()
            assert not keys(tiny_checkpoint).keys() & known, name
    compiler_version.cache_clear()
    assert keys(tiny_checkpoint).keys() == known and not neuron_tools.calls()


def test_the_second_machine_calls_no_compiler(
    neuron_tools: NeuronTools,
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["lookup", "--model", str(tiny_checkpoint), "--target", "trn2", "--repo", REPO]
    words += ["--sequence-length", "64", "--prefill-chunk-size", "8"]
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with connected_hub(monkeypatch):
        assert call(monkeypatch, capsys, *words)[0] == 3
        first = export_tiny(tiny_checkpoint, tmp_path / "first", **SIZES)
        compiled = len(neuron_tools.calls())
        assert len(sync(REPO, token=TOKEN).uploaded) == compiled > 0
        second = move_away(monkeypatch)
        code, out, _ = call(monkeypatch, capsys, *words)
        assert code == 0 and out.endswith(f"0 in {second}, {compiled} in {REPO}; 0 to be compiled\n")
        assert len(sync(REPO, upload=False).downloaded) == compiled
    assert set(keys(tiny_checkpoint).values()) == {"there"}
    again = export_tiny(tiny_checkpoint, tmp_path / "second", **SIZES)
    assert len(neuron_tools.calls()) == compiled
    assert folder_bytes(again / "graphs") == folder_bytes(first / "graphs")


def test_without_a_compiler_no_key_is_known(
    neuron_tools: NeuronTools,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (neuron_tools.folder / "neuronx-cc").unlink()
    words = ("lookup", "--model", str(tiny_checkpoint), "--target", "trn2", "--sequence-length", "64")
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 1 and out == "" and "compiling for trn2 needs the Neuron compiler" in err


def test_what_runs_here_as_hlo_is_kept_nowhere(tiny_checkpoint: Path) -> None:
    told = r"target='hlo' compiles nothing that is kept; name the target that is exported"
    with pytest.raises(ValueError, match=told):
        keys(tiny_checkpoint, target="hlo")
