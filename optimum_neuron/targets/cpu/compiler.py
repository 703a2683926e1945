# SPDX-License-Identifier: Apache-2.0
"""The exporter's half of the cpu target: a model as its kernels read it, and plans of graphs, made through the compile cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from ... import progress
from ...artifact.artifact import WEIGHTS_NAME, Artifact
from ...artifact.skeleton import assign, check_spec, check_tensors, empty_model, model_for
from ...artifact.tensor_file import TensorLike, stored_tensors
from ...artifact.weights import named_tensors, read_layout, untie, write_weights
from ...checkpoints.mapped import in_file, map_tensors
from ...config import NeuronConfig
from ...kernels.lower.lower import lower
from ...parity.inspect import inspect_model
from ...step.attention.kv_cache import KVCache
from ...step.features.codes.modules import is_experts
from ...step.one_thread import one_thread
from ...step.program import export_layers_once
from ...step.spec import PROMPT_LOGITS, GraphSpec, graph_specs
from ...step.state_specs import state_specs
from .. import CacheKeys, CompileJob
from ..cache.entries import About
from ..cache.store import CompileCache
from ..host_states import check_state_memory
from .facts import CACHE_KIND, CONSTANTS_SUFFIX, PLAN_SUFFIX, PlanFacts
from .native_library import load_kernels
from .ops import OPS
from .plan_keys import plan_keys


logger = logging.getLogger(__name__)


def use_natural_layout(model: nn.Module, stored: Mapping[str, TensorLike] | None = None) -> None:
    """Turn the weights of transposed experts into `[experts, out, in]`, as the kernel reads them.

    `stored` will replace the weights, named as in `weights.named_tensors`: layers stay as they are where these have the model's own layout.
    """
    for name, module in model.named_modules():
        if is_experts(module) and module.is_transposed:
            parameters = module.named_parameters(recurse=False)
            weights = {part: weight for part, weight in parameters if weight.dim() == 3}
            # Where all are square, both layouts look alike.
            oblong = [each for each, weight in weights.items() if weight.shape[1] != weight.shape[2]]
            own = None if stored is None or not oblong else stored.get(f"model.{name}.{oblong[0]}")
            if oblong and (own is None or tuple(own.shape) != tuple(weights[oblong[0]].shape)):
                for weight in weights.values():
                    weight.data = in_file(weight.data.transpose(1, 2).contiguous())
                module.is_transposed = False


def write_model(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Write a model's weights as the kernels read them; return the tied names, alias to stored name."""
    use_natural_layout(model)
    return write_weights(named_tensors(model), folder)


def find_cache_keys(
    model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
) -> CacheKeys:
    """Return the keys of a model's plans, as `Target.cache_keys`."""
    use_natural_layout(model)
    _take_memory(model)
    spec = inspect_model(model, compare=False)
    # Only now: a model's code may put buffers of another type in place of its own.
    stored, tied = untie(named_tensors(model))
    job = CompileJob(folder, config, spec, graph_specs(config), tied, trust_remote_code)
    return CacheKeys(CACHE_KIND, PLAN_SUFFIX, plan_keys(job, stored))


def _take_memory(model: nn.Module) -> None:
    """Give a model memory that is never filled, and so costs nothing; buffers hold zeros, as some are indices."""
    parameters = dict(model.named_parameters(prefix="model", remove_duplicate=False))
    unique, tied = untie(named_tensors(model))
    tensors = {
        name: (torch.empty if name in parameters else torch.zeros)(tensor.shape, dtype=tensor.dtype)
        for name, tensor in unique.items()
    }
    assign(model, tensors | {alias: tensors[stored] for alias, stored in tied.items()})


def check_model(artifact: Artifact, *, trust_remote_code: bool) -> None:
    """Refuse an artifact where model, weights and manifest contradict each other."""
    check_state_memory(artifact)
    layout = read_layout(artifact)
    model = model_for(artifact, layout, trust_remote_code=trust_remote_code)
    use_natural_layout(model, layout)
    check_tensors(model, layout, artifact.config.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        empty = {name: torch.empty(each.shape, dtype=getattr(torch, each.dtype.name)) for name, each in layout.items()}
        assign(model, empty)
        check_spec(model, artifact.model)


def compile_graphs(job: CompileJob) -> dict[str, Any]:
    """Write a plan per graph into the job's `graphs/`, and the constants of those that have some; return `target_data`.

    Raises:
        RuntimeError: a graph could not be compiled; the graph is named.
        OSError: the compile cache cannot be used.
    """
    cache = CompileCache(CACHE_KIND)
    folder = job.folder / "graphs"
    keys = plan_keys(job, stored_tensors(job.folder / WEIGHTS_NAME))
    missing = [spec for spec in job.graphs if not cache.fetch(keys[spec.name], folder, spec.name, PLAN_SUFFIX)]
    found, total = len(job.graphs) - len(missing), len(job.graphs)
    logger.info("%d of %d graphs are in the compile cache %s", found, total, cache.folder)
    if missing:
        model, states = _load_model(job)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        with one_thread(), cache.scratch() as scratch, progress.stage("Compiling graphs", len(missing)) as advance:
            for spec in missing:
                with progress.hold_collector():
                    _compile_graph(model, states, spec, job, scratch)
                cache.store(keys[spec.name], scratch, spec.name, folder, About(spec.name, CACHE_KIND, versions))
                advance(spec.name)
    load_kernels()  # what the plans call: better missed now than when the artifact is loaded
    return {}


def _load_model(job: CompileJob) -> tuple[nn.Module, KVCache]:
    """Return the model over the weights that the export has written: they are mapped, not copied."""
    tensors = map_tensors(job.folder / WEIGHTS_NAME)
    tensors |= {alias: tensors[name] for alias, name in job.tied_weights.items()}
    model = empty_model(job.folder, job.config.dtype, trust_remote_code=job.trust_remote_code)
    use_natural_layout(model, tensors)
    assign(model, tensors)
    return model, KVCache(state_specs(job.config, job.model), torch.empty)


def _compile_graph(model: nn.Module, states: KVCache, spec: GraphSpec, job: CompileJob, scratch: Path) -> None:
    try:
        program = export_layers_once(model, states, spec, OPS)
        names = [each.name for each in spec.outputs(job.model.vocab_size)]
        by_token = [str(i) for i, name in enumerate(names) if not spec.has_chunk or name == PROMPT_LOGITS]
        plan, constants = lower(program, spec.tokens, by_token)
        known: dict[str, Tensor] = {**program.state_dict, **program.constants, **constants}
        plan.check(known)  # as when it is loaded
    except Exception as error:  # of whatever the model's code does
        raise RuntimeError(f"graph {spec.name} could not be compiled: {type(error).__name__}: {error}") from error
    plan.save(scratch / (spec.name + PLAN_SUFFIX), PlanFacts(spec, job.model, job.config.dtype).to_dict(), known)
    if constants:
        save_file(constants, scratch / (spec.name + CONSTANTS_SUFFIX))
