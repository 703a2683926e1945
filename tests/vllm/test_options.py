# SPDX-License-Identifier: Apache-2.0
"""vLLM's options on an artifact: what its graphs cannot do is refused in a sentence, the rest is honoured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import run_until_it_ends
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE, WORKER


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def _served_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARTIFACT_VARIABLE, "")


def configure(model: Path, **arguments: Any) -> VllmConfig:
    """What `vllm serve` does before it starts an engine."""
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"tensor_parallel_size": 2},
            r"--tensor-parallel-size 2 is vLLM's, and an artifact brings its own: export with",
        ),
        ({"pipeline_parallel_size": 2}, r"--pipeline-parallel-size 2 is not supported: an artifact is one worker"),
        ({"dtype": "float16"}, r"--dtype float16 differs from the float32 that the artifact was exported with"),
        ({"max_model_len": 1024}, r"--max-model-len 1024 is more than the sequence_length=512 that the artifact"),
        ({"quantization": "fp8"}, r"--quantization fp8 is not supported: weights are fixed at export"),
        ({"enable_lora": True}, r"--enable-lora is not supported: weights are fixed at export"),
        ({"speculative_config": SPECULATION}, r"speculative decoding is not supported: graphs advance one token"),
        ({"kv_cache_dtype": "fp8"}, r"--kv-cache-dtype fp8 is not supported: the cache has the type of the weights"),
        ({"block_size": 16}, r"--block-size 16 is not supported: a block is a whole slot"),
        (
            {"num_gpu_blocks_override": 9},
            r"--num-gpu-blocks-override 9 is not supported: blocks are the compiled slots",
        ),
        ({"kv_offloading_size": 1.0}, r"is not supported: a slot's cache stays on its device"),
        (
            {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
            r"--kv-transfer-config is not supported: a slot's cache stays on its device",
        ),
        ({"runner": "pooling"}, r"--runner pooling is not supported: an artifact generates text"),
        (
            {"max_num_seqs": 4, "max_num_batched_tokens": 3},
            r"max_num_batched_tokens \(3\) must be greater than or equal",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_graphs_cannot_do_is_refused_with_the_reason(
    export_text: Callable[..., Path], arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        configure(export_text(), **arguments)


@pytest.mark.parametrize(("stored", "asked"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_type_of_the_artifact_wins_over_what_vllm_chooses_alone(
    export_text: Callable[..., Path], stored: str, asked: str
) -> None:
    artifact = export_text(dtype=stored)
    assert str(configure(artifact).model_config.dtype) == f"torch.{stored}"
    assert str(configure(artifact, dtype=stored).model_config.dtype) == f"torch.{stored}"
    if asked == "float32":  # vLLM chooses bfloat16 for a checkpoint in float32, as does a user who says so
        with pytest.raises(ValueError, match=r"--dtype float32 differs from the bfloat16 that the artifact was"):
            configure(artifact, dtype=asked)


def test_smaller_sizes_than_the_compiled_ones_are_honoured(export_text: Callable[..., Path]) -> None:
    vllm_config = configure(export_text(), max_model_len=300, max_num_seqs=3, max_num_batched_tokens=20)
    assert vllm_config.model_config.max_model_len == 300
    assert vllm_config.scheduler_config.max_num_seqs == 3
    assert vllm_config.scheduler_config.max_num_batched_tokens == 20


def test_a_larger_step_than_the_graphs_hold_is_kept_and_more_requests_than_slots_wait(
    export_text: Callable[..., Path],
) -> None:
    vllm_config = configure(export_text(), max_model_len=300, max_num_seqs=100, max_num_batched_tokens=1200)
    for _ in range(2):
        assert vllm_config.scheduler_config.max_num_batched_tokens == 1200
        assert vllm_config.scheduler_config.max_num_seqs == 4
        vllm_config.__post_init__()  # as in the engine's process, from what it is given


def test_without_options_a_step_is_one_run_of_a_graph(export_text: Callable[..., Path]) -> None:
    vllm_config = configure(export_text(ctx_batch_size=2))
    assert vllm_config.scheduler_config.max_num_batched_tokens == 64
    assert vllm_config.scheduler_config.enable_chunked_prefill
    assert vllm_config.model_config.max_model_len == 512
    assert vllm_config.cache_config.num_gpu_blocks_override == 5
    assert vllm_config.parallel_config.worker_cls == WORKER
    assert vllm_config.parallel_config.distributed_executor_backend == "uni"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: truncate(folder / "weights" / "model.safetensors"), r"is truncated: 1,000 bytes"),
        (lambda folder: (folder / "weights" / "model.safetensors").unlink(), r"weights/model\.safetensors"),
        (lambda folder: truncate(folder / "neuron_config.json"), r"neuron_config\.json is not valid JSON"),
        (lambda folder: set_version(folder / "neuron_config.json", 999), r"999"),
    ],
    ids=["truncated", "missing", "no_json", "newer"],
)
def test_a_damaged_artifact_is_refused_before_an_engine_starts(
    export_text: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    folder = Path(shutil.copytree(export_text(), tmp_path / "damaged"))
    damage(folder)
    with pytest.raises(ValueError, match=sentence):
        configure(folder)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def set_version(path: Path, version: int) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | {"format_version": version}), encoding="utf-8")


def test_the_last_lines_that_a_user_sees_tell_the_reason(export_text: Callable[..., Path], tmp_path: Path) -> None:
    code, output = run_until_it_ends(tmp_path, export_text(), "--tensor-parallel-size", "2")
    assert code != 0
    last = "\n".join(output.splitlines()[-3:])
    assert "--tensor-parallel-size 2 is vLLM's, and an artifact brings its own" in last
