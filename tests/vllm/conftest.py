# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests/vllm: a tiny checkpoint that reads and writes real text, its artifacts, and engines over them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Server, SharedServer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model


# An engine of the tiny model takes some 100 MB; those that no test uses any more make room.
ENGINES = 4
TEXT_SIZES = {
    "batch_size": 4, "sequence_length": 512, "prefill_chunk_size": 32, "dtype": "float32", "output_logits": True, "target": "eager",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _vllm_environment() -> Iterator[None]:
    """Engines of this process run in it: no fork or spawn, and tests can look into them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


@pytest.fixture(scope="session")
def text_checkpoint(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32 with SmolLM2's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-text"
    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    names = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **heads, **names)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        # Otherwise all tokens are attended to alike, and with tied embeddings every token repeats itself for ever.
        layer.self_attn.q_proj.weight.data *= 50
        layer.self_attn.o_proj.weight.data *= 50
        layer.mlp.down_proj.weight.data *= 50
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_model(text_checkpoint: Path) -> Any:
    """`text_checkpoint` in transformers."""
    return AutoModelForCausalLM.from_pretrained(text_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def export_text(text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Artifacts of `text_checkpoint` by their options; not to be changed."""
    made: dict[str, Path] = {}

    def export(**options: Any) -> Path:
        config = NeuronConfig(**TEXT_SIZES | options)
        key = repr(config)
        if key not in made:
            made[key] = export_model(text_checkpoint, tmp_path_factory.mktemp("text") / "artifact", config=config)
        return made[key]

    return export


@pytest.fixture(scope="session")
def configured(
    export_text: Callable[..., Path], tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """vLLM's configurations by sizes of the artifact and options of the engine; a `stateful` model's rows keep state."""
    made: dict[str, Any] = {}

    def one(sizes: dict[str, Any], options: dict[str, Any], *, stateful: bool = False) -> Any:
        from vllm.engine.arg_utils import EngineArgs  # after the environment is set

        key = repr((sizes, options, stateful))
        if key not in made:
            if stateful:
                config = NeuronConfig(**TEXT_SIZES | sizes)
                artifact = export_model(
                    tiny_checkpoints["lfm2"], tmp_path_factory.mktemp("lfm2") / "out", config=config
                )
            else:
                artifact = export_text(**sizes)
            made[key] = EngineArgs(model=str(artifact), **options).create_engine_config()
        return made[key]

    return one


@pytest.fixture(scope="module")
def vllm_config(export_text: Callable[..., Path]) -> Any:
    from vllm.engine.arg_utils import EngineArgs  # after the environment is set

    return EngineArgs(model=str(export_text())).create_engine_config()


@pytest.fixture(scope="session")
def open_llm() -> Iterator[Callable[..., Any]]:
    """vLLM engines in this process by path and options of `LLM`; those not used for longest are shut down."""
    engines: OrderedDict[str, tuple[Any, str]] = OrderedDict()

    def open_one(path: Path, **options: Any) -> Any:
        from vllm import LLM  # after the environment is set

        from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE

        key = repr((str(path), sorted(options.items())))
        if key not in engines:
            while len(engines) >= ENGINES:
                engines.popitem(last=False)[1][0].llm_engine.engine_core.shutdown()
            llm = LLM(str(path), **options)
            engines[key] = (llm, os.environ[ARTIFACT_VARIABLE])
        engines.move_to_end(key)
        # Requests are checked against the artifact that this process opened last.
        os.environ[ARTIFACT_VARIABLE] = engines[key][1]
        return engines[key][0]

    yield open_one
    for llm, _ in engines.values():
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def shared_server(
    export_text: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    server = SharedServer(export_text(), tmp_path_factory.mktemp)
    yield server
    server.close()
    server.collector.close()


@pytest.fixture
def text_server(shared_server: SharedServer) -> Server:
    """The one server of most tests; whoever uses it leaves it idle, or ends it."""
    return shared_server.get()


@pytest.fixture(scope="session")
def greedy(export_text: Callable[..., Path]) -> Callable[[list[int], int], list[int]]:
    """What `NeuronModelForCausalLM.generate` answers to a prompt, without any end of the text."""
    model = NeuronModelForCausalLM.from_pretrained(export_text())

    def answer(prompt: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(ids, max_new_tokens=new_tokens, **options)[0, len(prompt) :].tolist()

    return answer
