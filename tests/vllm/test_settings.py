# SPDX-License-Identifier: Apache-2.0
"""vLLM's options against what was compiled: fitted where they are sizes, refused in words where they cannot be honoured."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from vllm.config import CompilationMode, KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.vllm.options import _REFUSED, _REFUSED_AT_FIRST, _WITHOUT_EFFECT, find_served
from optimum_neuron.vllm.prefixes import SlotConnector
from optimum_neuron.vllm.scheduler import SlotScheduler, StepScheduler
from optimum_neuron.vllm.settings import ARTIFACT_VARIABLE, WORKER, configure


LENGTH, SLOTS, CHUNK = 512, 4, 32
STEP = CHUNK + SLOTS
SMALL = NeuronConfig(batch_size=2, sequence_length=128, prefill_chunk_size=16, target="eager")
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
SPECULATION = {"method": "ngram", "num_speculative_tokens": 2}
# Each with the value that is given, and words of the refusal.
REFUSED: list[tuple[str, Any, str]] = [
    ("tensor_parallel_size", 2, "--tensor-parallel-size 2 is vLLM's, and an artifact brings its own: export with --tensor-parallel-size 2, or serve "
     "a checkpoint with --additional-config '{\"tensor_parallel_size\": 2}'"),
    # The tiny model has 4 heads: vLLM could not split it.
    ("tensor_parallel_size", 3, "--tensor-parallel-size 3 is vLLM's, and an artifact brings its own: export with"),
    ("decode_context_parallel_size", 2, "--decode-context-parallel-size 2 is not supported: an artifact is one worker; leave it out"),
    ("pipeline_parallel_size", 2, "--pipeline-parallel-size 2 is not supported: an artifact is one worker; leave it out"),
    ("prefill_context_parallel_size", 2, "--prefill-context-parallel-size 2 is not supported: an artifact is one worker"),
    ("speculative_config", SPECULATION, "speculative decoding is not supported: graphs advance one token per request"),
    ("enable_lora", True, "--enable-lora is not supported: weights are fixed at export; merge the adapter before"),
    ("runner", "pooling", "--runner pooling is not supported: an artifact generates text; use --runner generate"),
    ("kv_cache_dtype", "fp8", "fp8 differs from the float32 of the artifact's cache; leave it out, or export with --kv-cache-dtype fp8"),
    ("num_gpu_blocks_override", 3, "--num-gpu-blocks-override 3 is not supported: the cache was sized at export; leave"),
    ("block_size", 16, "--block-size 16 differs from the cache that the artifact was exported with, of slots, not blocks; leave it out, or export "
     "with --kv-block-size 16"),
    ("kv_events_config", EVENTS, "--kv-events-config is not supported: this artifact's cache has slots, and no blocks; leave it out"),
    ("kv_transfer_config", KVTransferConfig(kv_connector="SharedStorageConnector", kv_role="kv_both"),
     "--kv-transfer-config is not supported: the cache stays on its devices; leave it out"),
    ("kv_offloading_size", 1.0, "--kv-offloading-size 1.0 is not supported: the cache stays on its devices; leave it out"),
    ("kv_cache_memory_bytes", 1 << 20, "--kv-cache-memory-bytes 1048576 is not supported: the cache was sized at"),
    ("cpu_offload_gb", 1.5, "--cpu-offload-gb 1.5 is not supported: the weights stay where the graphs run; leave"),
    ("load_format", "dummy", "--load-format dummy is not supported: weights come from the artifact; leave it out"),
    ("download_dir", "x", "--download-dir x is not supported: files of the Hub come from its own cache; set HF_HUB_"),
    ("hf_overrides", {"rope_theta": 1.0}, "--hf-overrides is not supported: the artifact, or the checkpoint as it"),
    ("model_impl", "transformers", "--model-impl transformers is not supported: the model is compiled into the"),
    ("enable_prompt_embeds", True, "--enable-prompt-embeds is not supported: graphs take token ids; leave it out"),
    ("quantization", "fp8", "--quantization fp8 is not supported: weights are fixed at export; leave it out"),
    ("max_model_len", 513, "--max-model-len 513 is more than the sequence_length=512 that the artifact was exported with; lower it, or export with "
     "--sequence-length 513"),
    ("dtype", "float16", "--dtype float16 differs from the float32 that the artifact was exported with; leave it out, or export with --dtype float16"),
    ("additional_config", {"batch_size": 5}, "batch_size=5 differs from the 4 that "),
    ("additional_config", {"artifact": "x"}, "unknown option 'artifact' in --additional-config"),
]  # fmt: skip


@pytest.fixture(scope="module")
def artifact(export_text: Callable[..., Path]) -> Path:
    return export_text()


def config_of(path: Path, context: UsageContext = UsageContext.LLM_CLASS, **options: Any) -> VllmConfig:
    return EngineArgs(model=str(path), **options).create_engine_config(context)


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_compiled_graphs_cannot_do_is_refused_with_the_remedy(
    artifact: Path, name: str, value: Any, message: str
) -> None:
    executor = {"distributed_executor_backend": "mp"} if (name, value) == ("tensor_parallel_size", 2) else {}
    with pytest.raises((ValueError, TypeError)) as refusal:
        config_of(artifact, **{name: value}, **executor)
    assert message in str(refusal.value)


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the plugin has said."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("vllm.optimum_neuron")]


def test_an_option_that_only_tunes_what_is_not_there_is_told_of_once(
    artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.optimum_neuron"):
        configure(config_of(artifact, enforce_eager=True, gpu_memory_utilization=0.5))
    assert ours(caplog) == [
        "--enforce-eager has no effect: the graphs are compiled already",
        "--gpu-memory-utilization has no effect: the artifact's cache decides how much memory is used",
    ]


def test_every_option_that_is_refused_exists(artifact: Path) -> None:
    config = config_of(artifact)
    for table in (_REFUSED, _REFUSED_AT_FIRST, _WITHOUT_EFFECT):
        for path in (path for options in table.values() for path in options):
            value: Any = config
            *sections, name = path.split(".")
            for section in sections:
                value = getattr(value, section)
            assert value is None or hasattr(value, name), path


@pytest.mark.parametrize("context", [UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER])
def test_sizes_that_nobody_gave_are_the_compiled_ones(
    artifact: Path, context: UsageContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.optimum_neuron"):
        config = config_of(artifact, context)
    scheduler, cache = config.scheduler_config, config.cache_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (SLOTS, STEP)
    assert (config.model_config.max_model_len, config.model_config.dtype) == (LENGTH, torch.float32)
    assert (cache.block_size, cache.num_gpu_blocks_override) == (LENGTH, SLOTS + 1)
    assert cache.enable_prefix_caching is False
    assert config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector == SlotConnector.__name__
    assert config.parallel_config.worker_cls == WORKER
    assert config.compilation_config.mode == CompilationMode.NONE
    assert os.environ[ARTIFACT_VARIABLE] == str(artifact)
    assert not ours(caplog)


@pytest.mark.parametrize(
    ("options", "sizes", "warning"),
    [
        ({"max_num_seqs": 3}, (3, STEP, LENGTH), ""),
        ({"max_num_seqs": 9}, (SLOTS, STEP, LENGTH), "max_num_seqs=9: the artifact has batch_size=4 rows"),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 4}, (SLOTS, 7, LENGTH), ""),
        ({"max_num_batched_tokens": 3}, (3, 3, LENGTH), ""),
        # What vLLM itself would choose, had nobody given it: for the server, and for LLM.
        ({"max_num_batched_tokens": 2048}, (SLOTS, 2048, LENGTH), "2048 is more than the 36 tokens that one step"),
        ({"max_model_len": 511, "max_num_seqs": 2}, (2, STEP, 511), ""),
        ({"max_model_len": -1}, (SLOTS, STEP, LENGTH), ""),
        ({"performance_mode": "throughput"}, (SLOTS, STEP, LENGTH), ""),
        ({"enable_chunked_prefill": False}, (SLOTS, 8192, LENGTH), "8192 is more than the 36 tokens that one step"),
    ],
)
def test_sizes_that_were_given_are_honoured_as_far_as_there_are_slots(
    artifact: Path,
    options: dict[str, Any],
    sizes: tuple[int, int, int],
    warning: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.optimum_neuron"):
        config = config_of(artifact, **options)
    scheduler = config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, config.model_config.max_model_len) == sizes
    assert config.cache_config.block_size == sizes[2]
    said = ours(caplog)
    assert len(said) == bool(warning) and all(warning in message for message in said)


@pytest.mark.parametrize("given", [None, 2048])
def test_the_same_arguments_make_the_same_configuration_twice(artifact: Path, given: int | None) -> None:
    arguments = EngineArgs(model=str(artifact), max_num_batched_tokens=given)
    first, second = (arguments.create_engine_config(UsageContext.OPENAI_API_SERVER) for _ in range(2))
    assert first.scheduler_config.max_num_batched_tokens == (given or STEP)
    assert second.scheduler_config == first.scheduler_config


def test_a_size_on_the_command_line_is_honoured_though_it_is_vllms_default(artifact: Path) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", str(artifact), "--max-num-batched-tokens=2048"])
    )
    scheduler = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config
    assert scheduler.max_num_batched_tokens == 2048


def test_a_step_holds_all_chunk_rows(export_text: Callable[..., Path]) -> None:
    config = config_of(export_text(ctx_batch_size=2, prefill_chunk_size=16))
    assert config.scheduler_config.max_num_batched_tokens == 2 * 16 + SLOTS


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, StepScheduler),
        ({"async_scheduling": False}, StepScheduler),
        ({"max_num_batched_tokens": CHUNK - 1}, StepScheduler),
        ({"max_num_batched_tokens": STEP + 1}, SlotScheduler),
        ({"max_num_batched_tokens": STEP + 1, "async_scheduling": False}, SlotScheduler),
        ({"max_num_batched_tokens": STEP, "max_model_len": STEP, "enable_chunked_prefill": False}, SlotScheduler),
        ({"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}, AsyncScheduler),
    ],
    ids=str,
)
def test_our_scheduler_fills_chunk_rows_where_a_step_is_to_be_one_run(
    artifact: Path, options: dict[str, Any], ours: type
) -> None:
    scheduler = config_of(artifact, **options).scheduler_config
    chosen = scheduler.get_scheduler_cls()
    assert issubclass(chosen, ours)
    assert issubclass(chosen, StepScheduler) is (ours is StepScheduler)
    assert issubclass(chosen, AsyncScheduler) is scheduler.async_scheduling
    assert scheduler.long_prefill_token_threshold == 0


def test_active_requests_are_never_more_than_the_slots(artifact: Path) -> None:
    assert config_of(artifact, max_num_active_seqs=9).scheduler_config.max_num_active_seqs == SLOTS
    assert config_of(artifact, max_num_active_seqs=2).scheduler_config.max_num_active_seqs == 2


@pytest.fixture(scope="module")
def block_artifact(export_text: Callable[..., Path]) -> Path:
    return export_text(kv_block_size=64, kv_cache_tokens=LENGTH)


@pytest.mark.parametrize(
    "options", [{}, {"block_size": 64}, {"enable_prefix_caching": True}, {"kv_events_config": EVENTS}], ids=str
)
def test_blocks_are_vllms_own(block_artifact: Path, options: dict[str, Any]) -> None:
    config = config_of(block_artifact, **options)
    cache = config.cache_config
    assert (cache.block_size, cache.num_gpu_blocks_override, cache.enable_prefix_caching) == (
        64,
        LENGTH // 64 + 1,
        True,
    )
    assert config.kv_transfer_config is None
    assert config.scheduler_config.max_num_batched_tokens == STEP
    assert issubclass(config.scheduler_config.get_scheduler_cls(), StepScheduler)


def test_vllms_own_scheduler_makes_steps_of_several_runs_over_blocks_of_the_compiled_size(
    block_artifact: Path,
) -> None:
    config = config_of(block_artifact, max_num_batched_tokens=STEP + 1, enable_prefix_caching=False)
    assert config.scheduler_config.get_scheduler_cls() is AsyncScheduler
    assert config.cache_config.enable_prefix_caching is False
    with pytest.raises(
        ValueError, match=r"of blocks of kv_block_size=64 tokens; leave it out, or export with --kv-block"
    ):
        config_of(block_artifact, block_size=16)


@pytest.mark.parametrize("blocks", [{}, {"kv_block_size": 64}], ids=["slots", "blocks"])
def test_prefix_caching_is_refused_where_no_prefix_can_be_reused(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, blocks: dict[str, int]
) -> None:
    path = export_model(
        tiny_checkpoints["lfm2"], tmp_path / "lfm2", config=replace(SMALL, state_snapshots=0, **blocks)
    )
    remedy = "keeps state_snapshots=0 of it; leave it out, or export with --state-snapshots 4"
    with pytest.raises(
        ValueError, match=f"--enable-prefix-caching is not supported: this model keeps state of .*{remedy}"
    ):
        config_of(path, enable_prefix_caching=True)
    for options in ({}, {"enable_prefix_caching": False}):
        config = config_of(path, **options)
        assert config.cache_config.enable_prefix_caching is False and config.kv_transfer_config is None


def test_over_blocks_our_scheduler_alone_finds_the_state_behind_a_prefix(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Also where steps are several runs. Another scheduler would start rows behind blocks alone."""
    sizes = replace(SMALL, kv_block_size=64, kv_cache_tokens=256)
    path = export_model(tiny_checkpoints["lfm2"], tmp_path / "lfm2", config=sizes)
    for options, scheduler in (({}, StepScheduler), ({"max_num_batched_tokens": 100}, SlotScheduler)):
        config = config_of(path, **options)
        assert config.cache_config.enable_prefix_caching is True and config.kv_transfer_config is None
        assert issubclass(config.scheduler_config.get_scheduler_cls(), scheduler)
    own = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "async_scheduling": False}
    with pytest.raises(
        ValueError,
        match=r"--scheduler-cls vllm\.v1\.core\.sched\.scheduler\.Scheduler does not look for next to blocks; leave one",
    ):
        config_of(path, enable_prefix_caching=True, **own)
    assert config_of(path, **own).cache_config.enable_prefix_caching is False


def test_the_type_of_a_cache_of_codes_may_be_repeated_and_no_other_given(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = export_model(tiny_checkpoints["llama"], tmp_path / "coded", config=replace(SMALL, kv_cache_dtype="int8"))
    for kind in ("auto", "int8_per_token_head"):
        assert config_of(path, kv_cache_dtype=kind).cache_config.block_size == 128
    for kind, remedy in (
        ("fp8", "leave it out, or export with --kv-cache-dtype fp8"),
        ("fp8_per_token_head", "leave it out, or export with --kv-cache-dtype fp8"),
        ("bfloat16", "leave it out"),
    ):
        with pytest.raises(ValueError) as refusal:
            config_of(path, kv_cache_dtype=kind)
        assert f"--kv-cache-dtype {kind} differs from the int8 of the artifact's cache; {remedy}" in str(refusal.value)


def test_a_checkpoint_is_exported_with_the_cache_that_is_asked_for(tiny_checkpoints: dict[str, Path]) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    options["additional_config"] = {"target": "eager"}
    served = find_served(config_of(tiny_checkpoints["llama"], kv_cache_dtype="fp8", **options))
    assert served is not None and served.artifact.config.kv_cache_dtype == "fp8"
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_e5m2 differs from the float32 of the artifact's cache"):
        config_of(tiny_checkpoints["llama"], kv_cache_dtype="fp8_e5m2", **options)


def snapshot(config: VllmConfig) -> str:
    parts = (config.scheduler_config, config.cache_config, config.model_config, config.parallel_config)
    return repr((parts, config.kv_transfer_config, config.additional_config, config.shutdown_timeout))


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 100, "enable_prefix_caching": False}]
)
def test_a_fitted_configuration_reaches_other_processes_and_is_not_changed_there(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    config = config_of(artifact, **options)
    monkeypatch.delenv(ARTIFACT_VARIABLE)
    received: VllmConfig = pickle.loads(pickle.dumps(config))
    assert snapshot(received) == snapshot(config)
    configure(received)
    assert snapshot(received) == snapshot(config)
    assert os.environ[ARTIFACT_VARIABLE] == str(artifact)
    served = find_served(received)
    assert served is not None and served.artifact.path == artifact


def test_a_configuration_without_a_model_is_left_alone() -> None:
    config = VllmConfig()
    assert config.parallel_config.worker_cls == WORKER
    assert config.kv_transfer_config is None


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        ({}, {}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": 20}, {}, {"temperature": 0.0, "top_k": 20}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"override_generation_config": {"top_k": 5}},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "temperature": 0.0, "max_new_tokens": 30}, {}, {"temperature": 0.0, "max_tokens": 30}),
        ({"do_sample": True, "temperature": 0.7}, {"generation_config": "vllm"}, {}),
    ],
)
def test_requests_that_say_nothing_get_what_other_doors_give(
    artifact: Path, tmp_path: Path, facts: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = NeuronModelForCausalLM.from_pretrained(artifact)
    model.generation_config = GenerationConfig(**facts, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(tmp_path / "artifact")
    config = EngineArgs(model=str(tmp_path / "artifact"), **options).create_engine_config(UsageContext.LLM_CLASS)
    configure(config)
    assert config.model_config.get_diff_sampling_param() == expected
