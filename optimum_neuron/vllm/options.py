# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM that compiled graphs cannot honour: refused with the remedy; those that only tune nothing are logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.config import CacheConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name


# Key of the additional configuration of an engine that was fitted to an artifact: the artifact's folder.
FITTED = "artifact"


class _Option(NamedTuple):
    """A field of vLLM's configuration that must have its default.

    Attributes:
        path: where it is, from VllmConfig on; versions of vLLM that lack it have nothing to refuse.
        off: its default.
        name: how users write it.
        reason: why anything else is refused, or has no effect.
    """

    path: str
    off: Any
    name: str
    reason: str


_ONE_WORKER = "an artifact is one worker"
_WEIGHTS = "weights are fixed at export"
_OWN_CACHE = "the cache stays on its devices"
_CACHE_SIZE = "the cache was sized at export"
_COMPILED = "the model is compiled into the artifact"
_FROM_ARTIFACT = "the artifact, or the checkpoint as it is, says what the model is"
_NO_COPY = "steps keep no such record"
_IN_PLACE = "the weights stay where the graphs run"
_FILES = "weights come from the artifact"
_REFUSED = (
    _Option("parallel_config.pipeline_parallel_size", 1, "--pipeline-parallel-size", _ONE_WORKER),
    _Option("parallel_config.prefill_context_parallel_size", 1, "--prefill-context-parallel-size", _ONE_WORKER),
    _Option("parallel_config.decode_context_parallel_size", 1, "--decode-context-parallel-size", _ONE_WORKER),
    _Option("parallel_config.enable_expert_parallel", False, "--enable-expert-parallel", _ONE_WORKER),
    _Option("parallel_config.enable_eplb", False, "--enable-eplb", _ONE_WORKER),
    _Option("parallel_config.enable_elastic_ep", False, "--enable-elastic-ep", _ONE_WORKER),
    _Option("parallel_config.enable_dbo", False, "--enable-dbo", "a step is one run of a graph"),
    _Option("cache_config.kv_offloading_size", None, "--kv-offloading-size", _OWN_CACHE),
    _Option("cache_config.kv_cache_memory_bytes", None, "--kv-cache-memory-bytes", _CACHE_SIZE),
    _Option("cache_config.kv_sharing_fast_prefill", False, "--kv-sharing-fast-prefill", _COMPILED),
    _Option("offload_config.uva.cpu_offload_gb", 0, "--cpu-offload-gb", _IN_PLACE),
    _Option("offload_config.prefetch.offload_group_size", 0, "--offload-group-size", _IN_PLACE),
    _Option("load_config.load_format", "auto", "--load-format", _FILES),
    _Option(
        "load_config.download_dir",
        None,
        "--download-dir",
        "files of the Hub come from its own cache; set HF_HUB_CACHE",
    ),
    _Option("load_config.model_loader_extra_config", {}, "--model-loader-extra-config", _FILES),
    _Option("model_config.hf_overrides", {}, "--hf-overrides", _FROM_ARTIFACT),
    _Option("model_config.hf_config_path", None, "--hf-config-path", _FROM_ARTIFACT),
    _Option("model_config.code_revision", None, "--code-revision", _FROM_ARTIFACT),
    _Option("model_config.model_impl", "auto", "--model-impl", _COMPILED),
    _Option("model_config.disable_sliding_window", False, "--disable-sliding-window", _COMPILED),
    _Option("model_config.quantization_config", None, "--quantization-config", _WEIGHTS),
    _Option("model_config.enable_prompt_embeds", False, "--enable-prompt-embeds", "graphs take token ids"),
    _Option("model_config.return_sampling_mask", False, "--return-sampling-mask", _NO_COPY),
    _Option("aux_output_config.enable_return_routed_experts", False, "--enable-return-routed-experts", _NO_COPY),
    _Option("attention_config.backend", None, "--attention-backend", _COMPILED),
    _Option("weight_transfer_config", None, "--weight-transfer-config", _WEIGHTS),
    _Option("ec_transfer_config", None, "--ec-transfer-config", "there is no encoder"),
    _Option("watermark_config", None, "watermarking", "it needs another model runner"),
)
# Set by the plugin itself, so that they are looked at only before it has.
_REFUSED_AT_FIRST = (
    _Option("cache_config.num_gpu_blocks_override", None, "--num-gpu-blocks-override", _CACHE_SIZE),
    _Option("kv_transfer_config", None, "--kv-transfer-config", _OWN_CACHE),
)
_WITHOUT_EFFECT = (
    _Option("model_config.enforce_eager", False, "--enforce-eager", "the graphs are compiled already"),
    _Option(
        "cache_config.gpu_memory_utilization",
        CacheConfig.gpu_memory_utilization,
        "--gpu-memory-utilization",
        "the artifact's cache decides how much memory is used",
    ),
)


def refuse_options(vllm_config: VllmConfig, *, fitted: bool) -> None:
    """Raise ValueError for an option that is set and that compiled graphs cannot honour; warns of those without effect.

    Args:
        fitted: the plugin has already fitted the configuration to the artifact, and logged what has no effect.
    """
    for reason in _reasons(vllm_config, fitted):
        raise ValueError(reason)
    if not fitted:
        for option, _ in _set(vllm_config, _WITHOUT_EFFECT):
            logger.warning("%s has no effect: %s", option.name, option.reason)


def refuse_arguments(arguments: EngineArgs) -> None:
    """Refuse options before vLLM looks at them: it would refuse some with a remedy that is none here."""
    if arguments.tensor_parallel_size > 1:
        raise ValueError(_tensor_parallel_reason(arguments.tensor_parallel_size))
    if FITTED in (arguments.additional_config or {}):
        raise TypeError(f"unknown option {FITTED!r} in --additional-config: name the artifact as --model")
    for option in _REFUSED:
        value = getattr(arguments, option.path.rpartition(".")[2], option.off)
        if value is not None and value != option.off:
            raise ValueError(_refusal(option, value))


def _tensor_parallel_reason(size: int) -> str:
    return (
        f"--tensor-parallel-size {size} is vLLM's, and an artifact brings its own: export with --tensor-parallel-size {size}, "
        f"or serve a checkpoint with --additional-config '{{\"tensor_parallel_size\": {size}}}'"
    )


def _refusal(option: _Option, value: Any) -> str:
    shown = f" {value}" if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    return f"{option.name}{shown} is not supported: {option.reason}; leave it out"


def _reasons(vllm_config: VllmConfig, fitted: bool) -> Iterator[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size > 1:
        yield _tensor_parallel_reason(parallel.tensor_parallel_size)
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is not supported: graphs advance one token per request and step; leave it out"
    if vllm_config.lora_config is not None:
        yield "--enable-lora is not supported: weights are fixed at export; merge the adapter before the export"
    if model.runner_type != "generate":
        yield f"--runner {model.runner_type} is not supported: an artifact generates text; use --runner generate"
    for option, value in _set(vllm_config, _REFUSED if fitted else _REFUSED + _REFUSED_AT_FIRST):
        yield _refusal(option, value)


def _set(vllm_config: VllmConfig, options: tuple[_Option, ...]) -> Iterator[tuple[_Option, Any]]:
    """Return the options that do not have their default, with their values."""
    for option in options:
        value: Any = vllm_config
        for name in option.path.split("."):
            value = getattr(value, name, option.off)
        if value is not None and value != option.off:
            yield option, value
