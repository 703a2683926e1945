# SPDX-License-Identifier: Apache-2.0
"""The worker that vLLM's executor drives: it loads an artifact and runs its steps, or refuses a call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from ..artifact.artifact import Artifact, ArtifactError
from ..config import NEURON_TARGETS
from ..runtime.runner import GraphRunner
from ..step.state_specs import byte_count
from ..targets import get_target
from .model_runner import ModelRunner
from .options import find_served


logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own name

# Methods that vLLM calls of its workers and that this one refuses, each with the reason. None of vLLM's paths to them has changed
# the state of the engine before, so that it serves on after the refusal.
_WEIGHTS = "weights are fixed at export; export the other weights, and serve that artifact"
_ADAPTERS = "weights are fixed at export; merge the adapter before the export"
_ONE_WORKER = "an artifact is one worker; leave it out"
_IMAGE = "an image of the process holds no devices; start the server from the artifact"
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
    "checkpoint_prepare": _IMAGE,
    "checkpoint_restore": _IMAGE,
    "take_draft_token_ids": "graphs advance one token per request and step; leave speculative decoding out",
    "get_encoder_timing_stats": _NO_ENCODER,
    "elastic_ep_execute": _ONE_WORKER,
    "reinitialize_distributed": _ONE_WORKER,
    "handle_ft_command": "vLLM's fault tolerance is for workers with connections to others; restart the server",
    "get_simple_cpu_offload_num_cpu_blocks": "the cache stays on its devices; leave the offloading of KV out",
    "profile": "the worker has no profiler; run the artifact under one by itself",
}


class _PendingOutput(AsyncModelRunnerOutput):
    """A step's output while the step still runs; `read` waits for its end."""

    def __init__(self, read: Callable[[], ModelRunnerOutput]) -> None:
        self._read = read

    def get_output(self) -> ModelRunnerOutput:
        return self._read()

    def get_kv_connector_output(self) -> None:
        """Return nothing: the connector has no side here. vLLM 0.33 demands the method, 0.32 does not call it."""


class NeuronWorker(WorkerBase):
    """The one worker of an engine, whatever number of devices the artifact takes.

    With async scheduling, steps run in a thread of their own, in vLLM's order, and vLLM schedules the next one meanwhile.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
        **_: Any,  # what other workers share
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        served = find_served(vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        self._served, self._artifact = served, served.artifact
        self._model = nn.Module()
        self._thread: ThreadPoolExecutor | None = None
        self._executing: Future[None] | None = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        set_random_seed(self.model_config.seed)
        if self._artifact.target in NEURON_TARGETS:
            from ..targets.neuron.sdk.devices import take_replica_cores

            replica = self.parallel_config.data_parallel_rank_local or 0
            take_replica_cores(replica, self._artifact.config.tensor_parallel_size)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        artifact = self._artifact
        self.model_runner: ModelRunner | None = ModelRunner(self._load_graphs(), artifact.model, self.vllm_config)
        if self.scheduler_config.async_scheduling:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="neuron-step")
        logger.info("serving %s: %d graphs for %s", artifact.path, len(artifact.graphs), artifact.target)

    def _load_graphs(self) -> GraphRunner:
        artifact, trusts_code = self._artifact, self.model_config.trust_remote_code
        executable = get_target(artifact.target).load(
            artifact, trust_native_code=self._served.trust_native_code, trust_remote_code=trusts_code
        )
        return GraphRunner(executable, artifact.config, artifact.graphs, artifact.model)

    def get_model(self) -> nn.Module:
        """Return a module without parameters: vLLM looks through a model's modules when it ends."""
        return self._model

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Return all layers as one: its blocks have the bytes of the whole cache. vLLM counts blocks and allocates nothing."""
        size, blocks = self.cache_config.block_size, self._artifact.config.kv_blocks + 1  # vLLM's own first one, too
        stored = byte_count((*self._artifact.states(), *self._artifact.kept_states()))
        per_token = -(-stored // (blocks * size))
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=-(-per_token // 2), dtype=torch.int8)
        return {"cache": spec}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]  # any one: there is no attention backend

    def determine_available_memory(self) -> int:
        """Return the bytes of the cache with its padding: they are allocated whatever vLLM finds."""
        pages: int = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        return pages * (self._artifact.config.kv_blocks + 1)

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    initialize_from_config = _do_nothing  # the cache came with the graphs
    get_kv_connector_handshake_metadata = _do_nothing  # the connector has no side here
    execute_dummy_batch = (
        _do_nothing  # replicas of a model with experts compute alone: none waits for the others' steps
    )
    reset_encoder_cache = _do_nothing  # there is no encoder
    reload_weights = _do_nothing  # an artifact's weights do not change, and `wake_up` has read them

    def compile_or_warm_up_model(self) -> CompilationTimes:
        assert self.model_runner is not None
        warm_up = self.model_runner.runner.warm_up
        if self._thread is None:
            warm_up()
        else:  # OpenMP gives every thread that computes workers, and more of them than cores do not wait awake for the next layer
            self._thread.submit(_inferring, warm_up).result()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        assert self.model_runner is not None
        if self._thread is None:
            self.model_runner.execute_step(scheduler_output)
        else:
            self._executing = self._thread.submit(_inferring, self.model_runner.execute_step, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            return None  # vLLM then asks for the tokens
        if self._executing is not None:
            self._executing.result()
        return EMPTY_MODEL_RUNNER_OUTPUT

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        assert self.model_runner is not None
        if self._thread is None:
            return self.model_runner.sample_step(grammar_output)()
        thread, sample = self._thread, partial(self._sample_step, self._executing, grammar_output)
        if self.model_runner.runner.runs_ahead:
            # vLLM asks once the next step is started. The thread of the steps alone may wait for the device.
            sampled = thread.submit(_inferring, sample)
            return _PendingOutput(lambda: thread.submit(_inferring, sampled.result()).result())
        return _PendingOutput(thread.submit(_inferring, lambda: sample()()).result)

    def _sample_step(
        self, executed: Future[None] | None, grammar_output: Any | None
    ) -> Callable[[], ModelRunnerOutput]:
        if executed is not None:
            executed.result()  # done; raises what the step raised
        assert self.model_runner is not None
        return self.model_runner.sample_step(grammar_output)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def list_loras(self) -> set[int]:
        return set()

    def synchronize_device(self) -> None:
        """Wait for the steps that were started: a pause is complete where none runs."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()  # runs when all before it has ended

    def sleep(self, level: int = 1) -> None:
        """Release weights, cache and devices, unless the artifact is gone. Loading brings the same back: both levels are one.

        vLLM has preempted or ended all requests before.
        """
        self.synchronize_device()
        assert self.model_runner is not None
        try:
            same = Artifact.open(self._artifact.path).manifest == self._artifact.manifest
        except (FileNotFoundError, ArtifactError):
            same = False
        if not same:
            logger.warning("%s is no longer what was loaded: its memory is kept during the sleep", self._artifact.path)
            return
        self.model_runner.unload_runner()
        gc.collect()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Load the artifact again, unless it went away. Weights and cache come together, whichever of them `tags` asks for first."""
        assert self.model_runner is not None
        if not self.model_runner.is_loaded:
            self.model_runner.load_runner(self._load_graphs())
            self.compile_or_warm_up_model()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the cache, and the graphs with it."""
        self.sleep()

    def shutdown(self) -> None:
        """End the step that runs, and release graphs, weights and devices."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.model_runner = None
        gc.collect()


@torch.inference_mode()
def _inferring(function: Any, *arguments: Any) -> Any:
    """Call a function in inference mode, which belongs to a thread."""
    return function(*arguments)


def _refuse_call(name: str, *_: Any, **__: Any) -> None:
    raise ValueError(f"{name} is not supported: {REFUSED_CALLS[name]}")


for _name in REFUSED_CALLS:
    setattr(NeuronWorker, _name, partial(_refuse_call, _name))
