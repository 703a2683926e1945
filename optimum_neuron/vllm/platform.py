# SPDX-License-Identifier: Apache-2.0
"""The platform that vLLM sees: a host with one worker, which runs compiled graphs."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from ..artifact.artifact import Artifact
from ..runtime.lengths import check_token_ids
from . import PLUGIN_NAME


if TYPE_CHECKING:  # vLLM imports its platform while it imports its configuration
    from vllm.config import VllmConfig


# A forked child of a process that has used OpenMP threads waits for ever in its first parallel region.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


class NeuronPlatform(Platform):
    """Tensors that vLLM touches are on the host, for Neuron targets too: the graphs own the device."""

    _enum = PlatformEnum.OOT
    device_name = PLUGIN_NAME
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    ray_device_key = "neuron_cores"
    # Replicas take their cores in the worker, which knows how many ranks an artifact has; this variable is never set.
    device_control_env_var = "OPTIMUM_NEURON_VLLM_REPLICA"
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32, torch.float16]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return PLUGIN_NAME

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def _do_nothing(cls, *_: Any, **__: Any) -> None:
        pass

    set_device = _do_nothing  # the worker takes its devices
    manual_seed_all = _do_nothing  # random numbers are drawn on the host
    import_kernels = _do_nothing  # none of vLLM's are used
    update_block_size_for_backend = _do_nothing  # a block is what was compiled, whatever vLLM would choose

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        raise RuntimeError("attention is inside the compiled graphs; no attention backend of vLLM is used")

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Refuse all: vLLM asks before it looks for the method's own packages."""
        raise ValueError(
            f"--quantization {quant} is not supported: weights are fixed at export; leave it out, or export a quantized "
            f"checkpoint first and serve the artifact"
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from .settings import configure

        configure(vllm_config)
        _served_artifact()  # read while it is there: requests are checked against it

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse, as a fault of the request, what the served artifact cannot honour: parameters and token ids.

        vLLM itself lets ids pass that only the tokenizer knows.
        """
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        from .sampling import check_request

        artifact = _served_artifact()
        if isinstance(params, SamplingParams) and artifact is not None:
            try:
                check_request(params, artifact.config)
                token_ids = np.asarray(processed_inputs.get("prompt_token_ids") or ())
                check_token_ids(token_ids, artifact.model.num_embeddings, "the prompt")
            except (TypeError, ValueError) as error:
                raise VLLMValidationError(str(error)) from error


def _served_artifact() -> Artifact | None:
    """Return the artifact that this process serves; None where it serves nothing."""
    from .settings import ARTIFACT_VARIABLE

    path = os.environ.get(ARTIFACT_VARIABLE)
    return _open_artifact(path) if path else None


_open_artifact = lru_cache(partial(Artifact.open, with_graphs=False))
