# SPDX-License-Identifier: Apache-2.0
"""Fits vLLM's configuration to an artifact: what its graphs cannot do is refused, sizes follow the compiled ones."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from vllm.config import CacheConfig, CompilationMode, ModelConfig, VllmConfig

from ..artifact.artifact import Artifact
from ..artifact.skeleton import read_generation_config
from ..config import NeuronConfig
from ..export.first_use import export_once
from ..runtime.defaults import left_to_requests, settings_of_host, usable, vllm_sampling
from .options import FITTED, GIVEN, find_served, find_source, refuse_options
from .prefixes import fit_prefix_caching
from .sampling import RAW_LOGPROBS


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name

WORKER = "optimum_neuron.vllm.worker.NeuronWorker"
# Rows of an artifact that is exported on first use, where --max-num-seqs says nothing.
DEFAULT_SLOTS = 8
# What vLLM calls codes with a scale for each token and head, and fp8 whatever its scales are.
_CODES_OF_CACHES = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8", "fp8": "fp8", "fp8_e4m3": "fp8"}
# As long as a rank's process may take to end.
SHUTDOWN_SECONDS = 15
# Names the served artifact to the processes of an engine, which do not all get its configuration.
ARTIFACT_VARIABLE = "OPTIMUM_NEURON_VLLM_ARTIFACT"


def configure(vllm_config: VllmConfig) -> None:
    """Make a configuration one of an artifact's; ValueError where an option differs from it. May be called again with the result."""
    vllm_config.compilation_config.mode = CompilationMode.NONE
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER
    if vllm_config.model_config is None or vllm_config.cache_config is None:
        return  # vLLM also makes configurations without a model
    fitted = FITTED in (vllm_config.additional_config or {})
    refuse_options(vllm_config, fitted=fitted)
    served = find_served(vllm_config)
    if served is None:
        sizes = _export_config(vllm_config)
        served = export_once(*find_source(vllm_config), lambda checkpoint: sizes, logger.warning)
    artifact, config = served.artifact, served.artifact.config
    os.environ[ARTIFACT_VARIABLE] = str(artifact.path)
    if not fitted:
        _check_cache(vllm_config, config)
        fit_prefix_caching(vllm_config, artifact)
        _fit_scheduler(vllm_config, artifact)
        # The one worker runs in the engine's process; vLLM would give it another where there are replicas.
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "mp" and parallel.data_parallel_size > 1:
            parallel.distributed_executor_backend = "uni"
        # Whoever looks again finds the artifact, also where a checkpoint was named.
        vllm_config.additional_config = {FITTED: str(artifact.path)}
    model, cache = vllm_config.model_config, vllm_config.cache_config
    _fit_model(model, config)
    _fit_defaults(model, artifact, warn=not fitted)
    # vLLM's blocks are the artifact's, or its slots; block 0, which vLLM never gives out, is none of them.
    cache.block_size = config.kv_block_size or model.max_model_len
    if cache.mamba_block_size is not None:  # of a model with other state than keys and values: rows keep it
        cache.mamba_block_size = model.max_model_len
    cache.num_gpu_blocks_override = config.kv_blocks + 1
    if vllm_config.shutdown_timeout == 0:
        # vLLM would kill the engine while it gives its devices back.
        vllm_config.shutdown_timeout = SHUTDOWN_SECONDS


def _export_config(vllm_config: VllmConfig) -> NeuronConfig:
    """Return the engine's own sizes, and those of --additional-config."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    options = dict(vllm_config.additional_config or {})
    sizes: dict[str, Any] = {
        "sequence_length": model.max_model_len,
        "batch_size": scheduler.max_num_seqs if "max_num_seqs" in GIVEN.get() else DEFAULT_SLOTS,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_block_size": _given_block_size(vllm_config.cache_config),
        # vLLM's requests sample from the whole vocabulary unless they say otherwise, and may ask for logprobs.
        "output_logits": True,
    }
    cache_dtype = vllm_config.cache_config.cache_dtype
    if "kv_cache_dtype" in GIVEN.get() and cache_dtype in _CODES_OF_CACHES:
        sizes["kv_cache_dtype"] = _CODES_OF_CACHES[cache_dtype]
    budget = scheduler.max_num_batched_tokens
    config = NeuronConfig.from_dict(sizes | options)
    smaller = "max_num_batched_tokens" in GIVEN.get() and budget < config.prefill_chunk_size
    if smaller and "prefill_chunk_size" not in options:
        config = NeuronConfig.from_dict(sizes | options | {"prefill_chunk_size": budget})
    _check_cache_dtype(cache_dtype, config)
    return config


def _fit_model(model: ModelConfig, config: NeuronConfig) -> None:
    asked = getattr(model, "original_max_model_len", None)
    if asked not in (None, -1) and model.max_model_len > config.sequence_length:
        raise ValueError(
            f"--max-model-len {model.max_model_len} is more than the sequence_length={config.sequence_length} that the "
            f"artifact was exported with; lower it, or export with --sequence-length {model.max_model_len}"
        )
    model.max_model_len = min(model.max_model_len, config.sequence_length)
    compiled = getattr(torch, config.dtype)
    if model.dtype != compiled:
        asked_dtype = str(model.dtype).removeprefix("torch.")
        if "dtype" in GIVEN.get():
            raise ValueError(
                f"--dtype {asked_dtype} differs from the {config.dtype} that the artifact was exported with; leave it out, or "
                f"export with --dtype {asked_dtype}"
            )
        model.dtype = compiled
    mode = model.logprobs_mode
    if config.top_logprobs is not None and mode != RAW_LOGPROBS and not config.returns_decode_logits:
        raise ValueError(
            f"--logprobs-mode {mode} needs logits on the host, and this artifact's graphs return {RAW_LOGPROBS} alone; leave it out, "
            f"or export the artifact with --output-logits"
        )


def _fit_defaults(model: ModelConfig, artifact: Artifact, *, warn: bool) -> None:
    """Set the defaults of requests: as everywhere, unless --generation-config names another source."""
    if model.generation_config != "auto":
        return
    config, _ = usable(read_generation_config(artifact, model.hf_config), artifact.config)
    model.override_generation_config = vllm_sampling(config) | (model.override_generation_config or {})
    names = settings_of_host(config, model.hf_config, artifact.config, str(artifact.path))
    foreign = left_to_requests(config, names)
    if foreign and warn:
        text = "vLLM takes no %s from generation_config.json; ask in each request for what vLLM has of it, as `stop`"
        logger.warning(text, ", ".join(foreign))


def _fit_scheduler(vllm_config: VllmConfig, artifact: Artifact) -> None:
    scheduler, config = vllm_config.scheduler_config, artifact.config
    if scheduler.max_num_seqs > config.batch_size:
        if "max_num_seqs" in GIVEN.get():
            text = "max_num_seqs=%d: the artifact has batch_size=%d rows, so that many requests run at once and the others wait"
            logger.warning(text, scheduler.max_num_seqs, config.batch_size)
        scheduler.max_num_seqs = config.batch_size
    if scheduler.max_num_active_seqs is not None:
        scheduler.max_num_active_seqs = min(scheduler.max_num_active_seqs, scheduler.max_num_seqs)
    budget = config.step_capacity
    if "max_num_batched_tokens" not in GIVEN.get() and scheduler.enable_chunked_prefill:
        logger.info("max_num_batched_tokens=%d: what one step of the artifact's graphs holds", budget)
        scheduler.max_num_batched_tokens = budget
    if scheduler.max_num_batched_tokens > budget:
        text = "max_num_batched_tokens=%d is more than the %d tokens that one step of the graphs holds: larger steps run several "
        logger.warning(
            text + "graphs, and running requests wait for all of them", scheduler.max_num_batched_tokens, budget
        )
    if scheduler.scheduler_cls is None:
        copied = vllm_config.kv_transfer_config is not None
        restored = vllm_config.cache_config.enable_prefix_caching and not artifact.model.reuses_prefixes
        one_run = scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens <= budget
        if one_run or copied or restored:  # otherwise vLLM's own
            kind = f"{'Async' if scheduler.async_scheduling else ''}{'Step' if one_run else 'Slot'}Scheduler"
            scheduler.scheduler_cls = f"optimum_neuron.vllm.scheduler.{kind}"


def _given_block_size(cache: CacheConfig) -> int | None:
    return cache.block_size if cache.user_specified_block_size else None


def _check_cache(vllm_config: VllmConfig, config: NeuronConfig) -> None:
    """Raise ValueError where options ask for another cache than the compiled one."""
    asked, compiled = _given_block_size(vllm_config.cache_config), config.kv_block_size
    if asked is not None and asked != compiled:
        had = "slots, not blocks" if compiled is None else f"blocks of kv_block_size={compiled} tokens"
        raise ValueError(
            f"--block-size {asked} differs from the cache that the artifact was exported with, of {had}; leave it out, or export "
            f"with --kv-block-size {asked}"
        )
    _check_cache_dtype(vllm_config.cache_config.cache_dtype, config)
    events = vllm_config.kv_events_config
    if compiled is None and events is not None and events.enable_kv_cache_events:
        raise ValueError(
            "--kv-events-config is not supported: this artifact's cache has slots, and no blocks; leave it out, or "
            "export with --kv-block-size 128"
        )


def _check_cache_dtype(asked: str, config: NeuronConfig) -> None:
    """Raise ValueError where --kv-cache-dtype is another one than the compiled cache's, or than the one to be compiled."""
    compiled = config.kv_cache_dtype or config.dtype
    if asked == "auto" or _CODES_OF_CACHES.get(asked, asked) == compiled:
        return
    if "kv_cache_dtype" not in GIVEN.get():
        logger.warning("the checkpoint asks for a cache of %s, and the artifact has one of %s", asked, compiled)
        return
    kind = _CODES_OF_CACHES.get(asked)
    remedy = "" if kind is None else f", or export with --kv-cache-dtype {kind}"
    raise ValueError(
        f"--kv-cache-dtype {asked} differs from the {compiled} of the artifact's cache; leave it out{remedy}"
    )
