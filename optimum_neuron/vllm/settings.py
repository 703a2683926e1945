# SPDX-License-Identifier: Apache-2.0
"""Fits vLLM's configuration to an artifact: what its graphs cannot do is refused, sizes follow the compiled ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, CompilationMode, KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig

from ..artifact.artifact import Artifact
from ..artifact.find import is_from_hub
from ..artifact.skeleton import read_generation_config
from ..config import ExportOptions, NeuronConfig
from ..export.first_use import Opened, export_once, open_artifact
from ..runtime.defaults import left_to_requests, settings_of_host, usable, vllm_sampling
from .engine_args import given
from .options import FITTED, refuse_options
from .sampling import RAW_LOGPROBS


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name

WORKER = "optimum_neuron.vllm.worker.NeuronWorker"
# By whether a step is one run of a graph, and whether scheduling is asynchronous.
SCHEDULERS = {
    (False, False): "optimum_neuron.vllm.scheduler.SlotScheduler",
    (False, True): "optimum_neuron.vllm.scheduler.AsyncSlotScheduler",
    (True, False): "optimum_neuron.vllm.scheduler.StepScheduler",
    (True, True): "optimum_neuron.vllm.scheduler.AsyncStepScheduler",
}
CONNECTOR, CONNECTOR_MODULE = "SlotConnector", "optimum_neuron.vllm.slot_connector"
# Rows of an artifact that is exported on first use, where --max-num-seqs says nothing.
DEFAULT_SLOTS = 8
# As long as a rank's process may take to end.
SHUTDOWN_SECONDS = 15
# Names the served artifact to the processes of an engine, which do not all get its configuration.
ARTIFACT_VARIABLE = "OPTIMUM_NEURON_VLLM_ARTIFACT"


def configure(vllm_config: VllmConfig) -> None:
    """Make a configuration one of an artifact's. May be called again with the result.

    Raises:
        ValueError: an option asks for what compiled graphs cannot do, or differs from what was compiled.
    """
    vllm_config.compilation_config.mode = CompilationMode.NONE
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER
    if vllm_config.model_config is None or vllm_config.cache_config is None:
        return  # vLLM also makes configurations without a model
    fitted = FITTED in (vllm_config.additional_config or {})
    refuse_options(vllm_config, fitted=fitted)
    artifact = (find_served(vllm_config) or _exported(vllm_config)).artifact
    os.environ[ARTIFACT_VARIABLE] = str(artifact.path)
    if not fitted:
        _check_cache(vllm_config, artifact)
        _fit_prefix_caching(vllm_config, artifact)
        _fit_scheduler(vllm_config, artifact)
        _fit_executor(vllm_config.parallel_config)
        # Whoever looks again finds the artifact, also where a checkpoint was named.
        vllm_config.additional_config = {FITTED: str(artifact.path)}
    _fit_model(vllm_config, artifact.config)
    _fit_defaults(vllm_config.model_config, artifact, warn=not fitted)
    _fit_cache(vllm_config, artifact.config)
    _check_logprobs(vllm_config.model_config.logprobs_mode, artifact.config)
    if vllm_config.shutdown_timeout == 0:
        # vLLM would kill the engine while it gives its devices back.
        vllm_config.shutdown_timeout = SHUTDOWN_SECONDS


def _check_logprobs(mode: str, config: NeuronConfig) -> None:
    if config.top_logprobs is not None and mode != RAW_LOGPROBS and not config.returns_decode_logits:
        raise ValueError(
            f"--logprobs-mode {mode} needs logits on the host, and this artifact's graphs return {RAW_LOGPROBS} alone; leave it out, "
            f"or export the artifact with --output-logits"
        )


def _exported(vllm_config: VllmConfig) -> Opened:
    config = _export_config(vllm_config)
    return export_once(*_source(vllm_config), lambda checkpoint: config, logger.warning)


def find_served(vllm_config: VllmConfig) -> Opened | None:
    """Return the artifact of a configuration; None where it names a checkpoint that is still to be exported."""
    options = dict(vllm_config.additional_config or {})
    fitted = options.pop(FITTED, None)
    model, reading = _source(vllm_config)
    if fitted is not None:
        model, reading = fitted, ExportOptions(trust_remote_code=reading.trust_remote_code)
    return open_artifact(model, reading, options)


def _source(vllm_config: VllmConfig) -> tuple[str, ExportOptions]:
    model = vllm_config.model_config
    # Offline, vLLM puts the folder of the asked revision in the place of the Hub id.
    revision = None if is_from_hub(Path(model.model)) else model.revision
    return model.model, ExportOptions(
        revision=revision, token=model.hf_token, trust_remote_code=model.trust_remote_code
    )


def _export_config(vllm_config: VllmConfig) -> NeuronConfig:
    """Return the engine's own sizes, and those of --additional-config."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    options = dict(vllm_config.additional_config or {})
    sizes: dict[str, Any] = {
        "sequence_length": model.max_model_len,
        "batch_size": scheduler.max_num_seqs if given().max_num_seqs else DEFAULT_SLOTS,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_block_size": _given_block_size(vllm_config.cache_config),
        # vLLM's requests sample from the whole vocabulary unless they say otherwise, and may ask for logprobs.
        "output_logits": True,
    } | _given_cache_dtype(vllm_config.cache_config.cache_dtype)
    budget = scheduler.max_num_batched_tokens
    config = NeuronConfig.from_dict(sizes | options)
    smaller = given().max_num_batched_tokens and budget < config.prefill_chunk_size
    if smaller and "prefill_chunk_size" not in options:
        config = NeuronConfig.from_dict(sizes | options | {"prefill_chunk_size": budget})
    _check_cache_dtype(vllm_config.cache_config.cache_dtype, config)
    return config


def _fit_model(vllm_config: VllmConfig, config: NeuronConfig) -> None:
    model = vllm_config.model_config
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
        if given().dtype:
            raise ValueError(
                f"--dtype {asked_dtype} differs from the {config.dtype} that the artifact was exported with; leave it out, or "
                f"export with --dtype {asked_dtype}"
            )
        model.dtype = compiled


def _fit_defaults(model: ModelConfig, artifact: Artifact, *, warn: bool) -> None:
    """Set the defaults of requests: as everywhere, unless --generation-config names another source."""
    if model.generation_config != "auto":
        return
    config, _ = usable(read_generation_config(artifact, model.hf_config), artifact.config)
    model.override_generation_config = vllm_sampling(config) | (model.override_generation_config or {})
    names = settings_of_host(config, model.hf_config, artifact.config, str(artifact.path))
    foreign = left_to_requests(config, names)
    if foreign and warn:
        logger.warning(
            "vLLM takes no %s from generation_config.json; ask in each request for what vLLM has of it, as `stop`",
            ", ".join(foreign),
        )


def _fit_scheduler(vllm_config: VllmConfig, artifact: Artifact) -> None:
    scheduler, config = vllm_config.scheduler_config, artifact.config
    if scheduler.max_num_seqs > config.batch_size:
        if given().max_num_seqs:
            logger.warning(
                "max_num_seqs=%d: the artifact has batch_size=%d rows, so that many requests run at once and the others wait",
                scheduler.max_num_seqs,
                config.batch_size,
            )
        scheduler.max_num_seqs = config.batch_size
    if scheduler.max_num_active_seqs is not None:
        scheduler.max_num_active_seqs = min(scheduler.max_num_active_seqs, scheduler.max_num_seqs)
    budget = config.step_capacity
    if not given().max_num_batched_tokens and scheduler.enable_chunked_prefill:
        logger.info("max_num_batched_tokens=%d: what one step of the artifact's graphs holds", budget)
        scheduler.max_num_batched_tokens = budget
    if scheduler.max_num_batched_tokens > budget:
        logger.warning(
            "max_num_batched_tokens=%d is more than the %d tokens that one step of the graphs holds: larger steps run "
            "several graphs, and running requests wait for all of them",
            scheduler.max_num_batched_tokens,
            budget,
        )
    if scheduler.scheduler_cls is None:
        copied = vllm_config.kv_transfer_config is not None
        restored = vllm_config.cache_config.enable_prefix_caching and not artifact.model.reuses_prefixes
        one_run = scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens <= budget
        if one_run or copied or restored:  # otherwise vLLM's own
            scheduler.scheduler_cls = SCHEDULERS[one_run, bool(scheduler.async_scheduling)]


def _fit_executor(parallel: ParallelConfig) -> None:
    """Run the one worker in the engine's process; vLLM would give it another where there are replicas."""
    if parallel.distributed_executor_backend == "mp" and parallel.data_parallel_size > 1:
        parallel.distributed_executor_backend = "uni"


def _given_block_size(cache: CacheConfig) -> int | None:
    return cache.block_size if cache.user_specified_block_size else None


def _check_cache(vllm_config: VllmConfig, artifact: Artifact) -> None:
    """Raise ValueError where options ask for another cache than the compiled one."""
    asked, compiled = _given_block_size(vllm_config.cache_config), artifact.config.kv_block_size
    if asked is not None and asked != compiled:
        had = "slots, not blocks" if compiled is None else f"blocks of kv_block_size={compiled} tokens"
        raise ValueError(
            f"--block-size {asked} differs from the cache that the artifact was exported with, of {had}; leave it out, or export "
            f"with --kv-block-size {asked}"
        )
    _check_cache_dtype(vllm_config.cache_config.cache_dtype, artifact.config)
    events = vllm_config.kv_events_config
    if compiled is None and events is not None and events.enable_kv_cache_events:
        raise ValueError(
            "--kv-events-config is not supported: this artifact's cache has slots, and no blocks; leave it out, or "
            "export with --kv-block-size 128"
        )
    if given().prefix_caching and not _reuses_prefixes(vllm_config, artifact):
        state = "this model keeps state of all tokens of a request together"
        if not artifact.config.state_places:
            raise ValueError(
                f"--enable-prefix-caching is not supported: {state}, and the artifact keeps state_snapshots=0 of it; leave it out, or "
                f"export with --state-snapshots 4"
            )
        raise ValueError(
            f"--enable-prefix-caching is not supported: {state}, which --scheduler-cls {_scheduler_name(vllm_config)} does not look for "
            f"next to blocks; leave one of them out"
        )


# What vLLM calls codes with a scale for each token and head, and fp8 whatever its scales are.
_CODES_OF_CACHES = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8", "fp8": "fp8", "fp8_e4m3": "fp8"}


def _check_cache_dtype(asked: str, config: NeuronConfig) -> None:
    """Raise ValueError where --kv-cache-dtype is another one than the compiled cache's, or than the one to be compiled."""
    compiled = config.kv_cache_dtype or config.dtype
    if asked == "auto" or _CODES_OF_CACHES.get(asked, asked) == compiled:
        return
    if not given().cache_dtype:
        logger.warning("the checkpoint asks for a cache of %s, and the artifact's is of %s", asked, compiled)
        return
    kind = _CODES_OF_CACHES.get(asked)
    remedy = "" if kind is None else f", or export with --kv-cache-dtype {kind}"
    raise ValueError(
        f"--kv-cache-dtype {asked} differs from the {compiled} of the artifact's cache; leave it out{remedy}"
    )


def _given_cache_dtype(asked: str) -> dict[str, str]:
    return {"kv_cache_dtype": _CODES_OF_CACHES[asked]} if given().cache_dtype and asked in _CODES_OF_CACHES else {}


def _reuses_prefixes(vllm_config: VllmConfig, artifact: Artifact) -> bool:
    """Reuse prefixes of rows that keep state after snapshots of it alone. Another scheduler would take blocks alone for a prefix."""
    if artifact.model.reuses_prefixes:
        return True
    of_ours = artifact.config.kv_block_size is None or vllm_config.scheduler_config.scheduler_cls is None
    return artifact.config.state_places > 0 and of_ours


def _scheduler_name(vllm_config: VllmConfig) -> str:
    name = vllm_config.scheduler_config.scheduler_cls
    return name if isinstance(name, str) else getattr(name, "__qualname__", str(name))


def _fit_prefix_caching(vllm_config: VllmConfig, artifact: Artifact) -> None:
    """Turn prefix caching on where the model allows it and the user did not turn it off: vLLM's own over blocks, with snapshots where rows keep state. Its own looks
    for whole blocks, and no prompt fills a slot: over slots the connector reuses prefixes of any length."""
    cache = vllm_config.cache_config
    wanted = given().prefix_caching
    reuses = _reuses_prefixes(vllm_config, artifact) and (cache.enable_prefix_caching if wanted is None else wanted)
    has_blocks = artifact.config.kv_block_size is not None
    cache.enable_prefix_caching = reuses and has_blocks
    if reuses and not has_blocks:
        # A consumer's blocks are freed a step late, for loads that come from elsewhere at any time. Copies of slots are parts of steps.
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_producer"
        )


def _fit_cache(vllm_config: VllmConfig, config: NeuronConfig) -> None:
    """Make vLLM's blocks the artifact's, or its slots; block 0, which vLLM never gives out, is none of them."""
    cache = vllm_config.cache_config
    cache.block_size = config.kv_block_size or vllm_config.model_config.max_model_len
    if cache.mamba_block_size is not None:  # of a model with other state than keys and values: rows keep it
        cache.mamba_block_size = vllm_config.model_config.max_model_len
    cache.num_gpu_blocks_override = config.kv_blocks + 1
