# SPDX-License-Identifier: Apache-2.0
"""Methods that vLLM calls of its workers and that this one refuses, each with the reason.

None of vLLM's paths to them has changed the state of the engine before, so that it serves on after the refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar


_WEIGHTS = "weights are fixed at export; export the other weights, and serve that artifact"
_ADAPTERS = "weights are fixed at export; merge the adapter before the export"
_ONE_WORKER = "an artifact is one worker; leave it out"
_SNAPSHOT = "an image of the process holds no devices; start the server from the artifact"
_NO_ENCODER = "there is no encoder; leave it out"
REFUSED_CALLS = {
    "add_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "pin_lora": _ADAPTERS,
    "init_weight_transfer_engine": _WEIGHTS,
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
    "reset_weights": _WEIGHTS,
    "compute_weight_checksums": "the compiled graphs hold the weights in their own layout; compare artifacts by neuron inspect",
    "save_sharded_state": "the artifact is what is saved; copy its folder",
    "save_tensorized_model": "the artifact is what is saved; copy its folder",
    "checkpoint_prepare": _SNAPSHOT,
    "checkpoint_restore": _SNAPSHOT,
    "take_draft_token_ids": "graphs advance one token per request and step; leave speculative decoding out",
    "get_encoder_timing_stats": _NO_ENCODER,
    "elastic_ep_execute": _ONE_WORKER,
    "reinitialize_distributed": _ONE_WORKER,
    "handle_ft_command": "vLLM's fault tolerance is for workers with connections to others; restart the server",
    "get_simple_cpu_offload_num_cpu_blocks": "the cache stays on its devices; leave the offloading of KV out",
    "profile": "the worker has no profiler; run the artifact under one by itself",
}


C = TypeVar("C", bound=type)


def refuse_calls(cls: C) -> C:
    """Give a worker's class a method for each of these names, which raises ValueError with the reason."""
    for name, reason in REFUSED_CALLS.items():
        setattr(cls, name, _refusing(name, reason))
    return cls


def _refusing(name: str, reason: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{name} is not supported: {reason}")

    return refuse
