# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM: which ones a user gave, and those that compiled graphs cannot honour, refused with the remedy.

vLLM fills in the options that are not given, and checks some, before its platform sees any of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm.config import CacheConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from ..artifact.find import is_from_hub
from ..config import ExportOptions
from ..export.first_use import Opened, open_artifact


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name


# Key of the additional configuration of an engine that was fitted to an artifact: the artifact's folder.
FITTED = "artifact"
_CACHE_SIZE = "the cache was sized at export"
# By the reason: fields of VllmConfig that must have their default, this one. Versions of vLLM that lack one have nothing to refuse.
_REFUSED: dict[str, dict[str, Any]] = {
    "an artifact is one worker": {
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.enable_expert_parallel": False,
        "parallel_config.enable_eplb": False,
        "parallel_config.enable_elastic_ep": False,
    },
    "a step is one run of a graph": {"parallel_config.enable_dbo": False},
    "the cache stays on its devices": {"cache_config.kv_offloading_size": None},
    _CACHE_SIZE: {"cache_config.kv_cache_memory_bytes": None},
    "the model is compiled into the artifact": {
        "cache_config.kv_sharing_fast_prefill": False,
        "model_config.model_impl": "auto",
        "model_config.disable_sliding_window": False,
        "attention_config.backend": None,
    },
    "the weights stay where the graphs run": {
        "offload_config.uva.cpu_offload_gb": 0,
        "offload_config.prefetch.offload_group_size": 0,
    },
    "weights come from the artifact": {
        "load_config.load_format": "auto",
        "load_config.model_loader_extra_config": {},
    },
    "files of the Hub come from its own cache; set HF_HUB_CACHE": {"load_config.download_dir": None},
    "the artifact, or the checkpoint as it is, says what the model is": {
        "model_config.hf_overrides": {},
        "model_config.hf_config_path": None,
        "model_config.code_revision": None,
    },
    "weights are fixed at export": {"model_config.quantization_config": None, "weight_transfer_config": None},
    "weights are fixed at export; merge the adapter before the export": {"lora_config": None},
    "graphs advance one token per request and step": {"speculative_config": None},
    "an artifact generates text; use --runner generate": {"model_config.runner_type": "generate"},
    "graphs take token ids": {"model_config.enable_prompt_embeds": False},
    "steps keep no such record": {
        "model_config.return_sampling_mask": False,
        "aux_output_config.enable_return_routed_experts": False,
    },
    "there is no encoder": {"ec_transfer_config": None},
    "it needs another model runner": {"watermark_config": None},
}
# Set by the plugin itself, so that they are looked at only before it has.
_REFUSED_AT_FIRST: dict[str, dict[str, Any]] = {
    _CACHE_SIZE: {"cache_config.num_gpu_blocks_override": None},
    "the cache stays on its devices": {"kv_transfer_config": None},
}
_WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "the graphs are compiled already": {"model_config.enforce_eager": False},
    "the artifact's cache decides how much memory is used": {
        "cache_config.gpu_memory_utilization": CacheConfig.gpu_memory_utilization
    },
}
# Where users write an option in another way than by its field's name.
_NAMES = {
    "attention_config.backend": "--attention-backend", "watermark_config": "watermarking", "lora_config": "--enable-lora",
    "speculative_config": "speculative decoding", "model_config.runner_type": "--runner",
}  # fmt: skip


# Values that a user gave, of the configuration that vLLM is making. One that is not made of arguments has no others.
_ALL_GIVEN = MappingProxyType(dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype")))
GIVEN: ContextVar[Mapping[str, Any]] = ContextVar("given", default=_ALL_GIVEN)
_LEFT_OUT = {
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": None,
}


def watch_arguments(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineArgs.create_engine_config`: note what it was given, and refuse what vLLM would refuse with another remedy."""

    @functools.wraps(make)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        _refuse_arguments(self)
        # Kept with the arguments: vLLM writes its defaults into them, and may be asked again.
        found = {name: value for name, left in _LEFT_OUT.items() if (value := getattr(self, name)) != left}
        before = GIVEN.set(vars(self).setdefault("given", found))
        try:
            return make(self, *args, **kwargs)
        finally:
            GIVEN.reset(before)

    return create_engine_config


def find_served(vllm_config: VllmConfig) -> Opened | None:
    """Return the artifact of a configuration; None where it names a checkpoint that is still to be exported."""
    options = dict(vllm_config.additional_config or {})
    fitted = options.pop(FITTED, None)
    model, reading = find_source(vllm_config)
    if fitted is not None:
        model, reading = fitted, ExportOptions(trust_remote_code=reading.trust_remote_code)
    return open_artifact(model, reading, options)


def find_source(vllm_config: VllmConfig) -> tuple[str, ExportOptions]:
    """Return the model that a user named, and the options of reading it."""
    model = vllm_config.model_config
    # Offline, vLLM puts the folder of the asked revision in the place of the Hub id.
    revision = None if is_from_hub(Path(model.model)) else model.revision
    return model.model, ExportOptions(
        revision=revision, token=model.hf_token, trust_remote_code=model.trust_remote_code
    )


def refuse_options(vllm_config: VllmConfig, *, fitted: bool) -> None:
    """Raise ValueError for an option that is set and that compiled graphs cannot honour; warn of those without effect, once."""
    _refuse_tensor_parallel(vllm_config.parallel_config.tensor_parallel_size)
    for table in (_REFUSED,) if fitted else (_REFUSED, _REFUSED_AT_FIRST):
        for path, value, reason in _list_set(vllm_config, table):
            raise ValueError(_refusal(path, value, reason))
    if not fitted:
        for path, _, reason in _list_set(vllm_config, _WITHOUT_EFFECT):
            logger.warning("%s has no effect: %s", _option_name(path), reason)


def _refuse_arguments(arguments: EngineArgs) -> None:
    _refuse_tensor_parallel(arguments.tensor_parallel_size)
    if FITTED in (arguments.additional_config or {}):
        raise TypeError(f"unknown option {FITTED!r} in --additional-config: name the artifact as --model")
    for reason, options in _REFUSED.items():
        for path, off in options.items():
            value = getattr(arguments, path.rpartition(".")[2], off)
            if value is not None and value != off:
                raise ValueError(_refusal(path, value, reason))


def _refuse_tensor_parallel(size: int) -> None:
    if size > 1:
        raise ValueError(
            f"--tensor-parallel-size {size} is vLLM's, and an artifact brings its own: export with --tensor-parallel-size {size}, "
            f"or serve a checkpoint with --additional-config '{{\"tensor_parallel_size\": {size}}}'"
        )


def _option_name(path: str) -> str:
    return _NAMES.get(path) or "--" + path.rpartition(".")[2].replace("_", "-")


def _refusal(path: str, value: Any, reason: str) -> str:
    shown = f" {value}" if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    remedy = "" if ";" in reason else "; leave it out"
    return f"{_option_name(path)}{shown} is not supported: {reason}{remedy}"


def _list_set(vllm_config: VllmConfig, table: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Yield the options of a table that do not have their default, with their values and reasons."""
    for reason, options in table.items():
        for path, off in options.items():
            value: Any = vllm_config
            for name in path.split("."):
                value = getattr(value, name, off)
            if value is not None and value != off:
                yield path, value, reason
