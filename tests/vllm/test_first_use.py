# SPDX-License-Identifier: Apache-2.0
"""Serving what is no artifact folder: checkpoints, which are exported on first use, and repositories of the Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import openai
import pytest
from llm_answers import NEW, ask, greedy
from serving import Server, is_healthy, serving
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.vllm import settings
from optimum_neuron.vllm.options import find_served
from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE, DEFAULT_SLOTS


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZES: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 3, "dtype": "float32"}
EAGER: dict[str, Any] = {"target": "eager"}
PROMPT = list(range(100, 150))


@pytest.fixture(scope="module")
def shared_cache() -> str:
    """What other tests have compiled."""
    return os.environ["OPTIMUM_NEURON_CACHE"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, shared_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for exports; what this process serves is its own business again afterwards."""
    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")
    return tmp_path / "cache"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of each export; vLLM's logger, below which it is said, passes nothing on."""
    said: list[str] = []
    monkeypatch.setattr(
        settings.logger, "warning", lambda text, *values: said.append(text % values if values else text)
    )
    return said


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Puts a folder into the Hub's cache as someone/tiny, as the Hub's client would; returns its place."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder: Path) -> Path:
        repository = tmp_path / "hub" / "models--someone--tiny"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
        return Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))

    return put


def configure(model: Path | str, options: dict[str, Any] = EAGER, **arguments: Any) -> VllmConfig:
    """What `vllm serve` does before it starts an engine."""
    arguments = SIZES | arguments
    engine = EngineArgs(model=str(model), additional_config=dict(options), **arguments)
    return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


def served(vllm_config: VllmConfig) -> Artifact:
    found = find_served(vllm_config)
    assert found is not None
    return found.artifact


def test_a_checkpoint_is_exported_once_and_answers_as_transformers_does(
    text_checkpoint: Path, text_model: Any, open_llm: Callable[..., Any], cache: Path, exports: list[str]
) -> None:
    first = open_llm(text_checkpoint, additional_config=EAGER, **SIZES)
    assert ask(first, [PROMPT]) == [greedy(text_model, PROMPT, NEW)]
    (folder,) = (path for path in (cache / "exports").iterdir() if path.is_dir())
    made = (folder / "neuron_config.json").stat().st_mtime_ns
    again = open_llm(text_checkpoint, additional_config=EAGER, seed=1, **SIZES)
    assert again is not first
    assert ask(again, [PROMPT]) == ask(first, [PROMPT])
    assert len(exports) == 1
    assert (folder / "neuron_config.json").stat().st_mtime_ns == made


def test_the_artifact_has_the_sizes_of_the_engine(text_checkpoint: Path, cache: Path) -> None:
    vllm_config = configure(text_checkpoint, EAGER | {"prefill_chunk_size": 16}, dtype="bfloat16")
    artifact = served(vllm_config)
    assert artifact.path.is_relative_to(cache) and artifact.target == "eager"
    config, scheduler = artifact.config, vllm_config.scheduler_config
    assert (config.sequence_length, config.batch_size, config.dtype) == (160, 3, "bfloat16")
    assert config.prefill_chunk_size == 16 and config.output_logits
    assert vllm_config.model_config.max_model_len == 160
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 16 + 3)


@pytest.mark.parametrize(("options", "arguments"), [({"kv_block_size": 64}, {}), ({}, {"block_size": 64})])
def test_a_cache_of_blocks_is_made_where_it_is_asked_for(
    text_checkpoint: Path, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    cached = {"kv_cache_tokens": 320}
    vllm_config = configure(text_checkpoint, EAGER | cached | options, **arguments, max_model_len=256)
    config = served(vllm_config).config
    assert (config.kv_block_size, config.kv_blocks) == (64, 5)
    assert (vllm_config.cache_config.block_size, vllm_config.cache_config.num_gpu_blocks_override) == (64, 6)


@pytest.mark.parametrize(
    ("arguments", "slots", "chunk", "budget"),
    [
        ({}, DEFAULT_SLOTS, 128, 128 + DEFAULT_SLOTS),
        ({"max_num_seqs": 2}, 2, 128, 130),
        ({"max_num_batched_tokens": 24}, DEFAULT_SLOTS, 24, 24),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 500}, 2, 128, 500),
    ],
    ids=str,
)
def test_sizes_that_nobody_gave_follow_from_the_graphs(
    text_checkpoint: Path, arguments: dict[str, Any], slots: int, chunk: int, budget: int
) -> None:
    vllm_config = configure(text_checkpoint, **{"max_num_seqs": None} | arguments)
    config = served(vllm_config).config
    assert (config.batch_size, config.prefill_chunk_size) == (slots, chunk)
    assert vllm_config.scheduler_config.max_num_seqs == slots
    assert vllm_config.scheduler_config.max_num_batched_tokens == budget
    # The engine's process makes the configuration again from what it is given.
    vllm_config.__post_init__()
    assert vllm_config.scheduler_config.max_num_batched_tokens == budget


def test_options_that_are_none_are_refused_by_name(text_checkpoint: Path, export_text: Callable[..., Path]) -> None:
    for model in (text_checkpoint, export_text()):
        with pytest.raises(TypeError, match=r"unknown option 'prefil_chunk_size' = 16; did you mean"):
            configure(model, {"prefil_chunk_size": 16})
    with pytest.raises(ValueError, match=r"prefill_chunk_size=16 differs from the 32 that .* was exported with"):
        configure(export_text(), {"prefill_chunk_size": 16})


@pytest.mark.parametrize(("named", "trusted"), [("id", True), ("id", False), ("folder", False), ("link", False)])
def test_native_code_of_a_hub_artifact_runs_only_where_it_is_trusted(
    export_text: Callable[..., Path], hub: Callable[[Path], Path], tmp_path: Path, trusted: bool, named: str
) -> None:
    snapshot = hub(export_text())
    (tmp_path / "link").symlink_to(snapshot.parent)
    path = tmp_path / "link" / snapshot.name if named == "link" else snapshot
    vllm_config = configure("someone/tiny" if named == "id" else f"{path}/", {}, trust_remote_code=trusted)
    found = find_served(vllm_config)
    assert found is not None
    assert found.artifact.path == path
    assert found.trust_native_code is trusted
    assert vllm_config.model_config.max_model_len == SIZES["max_model_len"]


def test_a_revision_is_one_of_a_hub_repository(export_text: Callable[..., Path], hub: Callable[[Path], Path]) -> None:
    snapshot = hub(export_text())
    found = find_served(configure("someone/tiny", {}, revision="main"))
    assert found is not None and found.artifact.path == snapshot
    with pytest.raises(ValueError, match=r"revision='v1' names a state of a Hub repository, and .* is a local path"):
        configure(export_text(), {}, revision="v1")


def test_a_hub_artifact_with_foreign_code_is_compiled_here(
    text_model: Any,
    export_text: Callable[..., Path],
    hub: Callable[[Path], Path],
    open_llm: Callable[..., Any],
    shared_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", shared_cache)
    snapshot = hub(export_text(batch_size=1, sequence_length=96, prefill_chunk_size=64, target="cpu"))
    for code in (snapshot / "graphs").iterdir():
        code.write_bytes(b"hostile")
    assert ask(open_llm("someone/tiny"), [PROMPT]) == [greedy(text_model, PROMPT, NEW)]


def test_a_server_of_a_checkpoint_says_what_it_compiles_and_needs_the_artifact_no_more_once_it_is_ready(
    text_checkpoint: Path, text_model: Any, tmp_path: Path, cache: Path
) -> None:
    options = ["--max-model-len", "160", "--max-num-seqs", "3", "--dtype", "float32"]
    options += ["--additional-config", '{"target": "eager"}']
    with serving(tmp_path, text_checkpoint, *options) as server:
        assert list((cache / "exports").glob("*/neuron_config.json"))
        shutil.rmtree(cache)
        assert complete(server, max_tokens=NEW).choices[0].token_ids == greedy(text_model, PROMPT, NEW)
        with pytest.raises(openai.BadRequestError, match=r"prompt_logprobs needs the logits of all tokens"):
            complete(server, max_tokens=1, prompt_logprobs=1)
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        assert server.client.chat.completions.create(model=server.model, messages=messages, max_tokens=2).choices
        assert is_healthy(server)
        output = server.output()
    assert (
        f"{text_checkpoint} is a checkpoint: exporting it once, for 3 requests of up to 160 tokens, to {tmp_path}"
        in output
    )
    assert f"optimum-cli export neuron OUT --model {text_checkpoint} --batch-size 3" in output


def complete(server: Server, max_tokens: int, **extra: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True} | extra
    return server.client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, extra_body=extra
    )
