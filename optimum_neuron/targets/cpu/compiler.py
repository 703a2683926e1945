# SPDX-License-Identifier: Apache-2.0
"""Makes the plans of an artifact's graphs, through a cache of plans made before."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from ... import progress
from ...artifact.artifact import WEIGHTS_NAME
from ...artifact.skeleton import assign, empty_model
from ...artifact.tensor_file import stored_tensors
from ...checkpoints.mapped import map_tensors
from ...kernels.build import library
from ...kernels.lower.lower import lower
from ...kernels.plan.check import check_plan
from ...kernels.plan.live import leave_out_dead
from ...kernels.plan.values import dtype_name
from ...step.kv_cache import KVCache
from ...step.one_thread import one_thread
from ...step.program import export_layers_once
from ...step.spec import PROMPT_LOGITS, GraphSpec
from ...step.state_specs import state_specs
from .. import CompileJob
from ..cache.entries import About
from ..cache.store import CompileCache
from .layout import use_natural_layout
from .ops import OPS
from .plan_file import Facts, write_plan
from .plan_keys import plan_keys


logger = logging.getLogger(__name__)

CACHE_KIND = "cpu"
PLAN_SUFFIX, CONSTANTS_SUFFIX = ".json", ".safetensors"


def compile_graphs(job: CompileJob) -> dict[str, Any]:
    """Writes a plan per graph into the job's `graphs/`, and the constants of those that have some; returns `target_data`.

    Raises:
        RuntimeError: a graph could not be compiled; the graph is named.
        OSError: the compile cache cannot be used.
    """
    library.load()  # what the plans call: better missed now than by who loads the artifact
    cache = CompileCache(CACHE_KIND)
    folder = job.folder / "graphs"
    keys = plan_keys(job, stored_tensors(job.folder / WEIGHTS_NAME))
    missing = [spec for spec in job.graphs if not cache.fetch(keys[spec.name], folder, spec.name, PLAN_SUFFIX)]
    logger.info(
        "%d of %d graphs are in the compile cache %s", len(job.graphs) - len(missing), len(job.graphs), cache.folder
    )
    if missing:
        model, states = _load(job)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        with one_thread(), cache.scratch() as scratch, progress.stage("Compiling graphs", len(missing)) as advance:
            for spec in missing:
                with _no_collections():
                    _compile(model, states, spec, job, scratch)
                cache.store(keys[spec.name], scratch, spec.name, folder, About(spec.name, CACHE_KIND, versions))
                advance(spec.name)
    return {}


def _load(job: CompileJob) -> tuple[nn.Module, KVCache]:
    """The model over the weights that the export has written: they are mapped, not copied."""
    tensors = map_tensors(job.folder / WEIGHTS_NAME)
    tensors |= {alias: tensors[name] for alias, name in job.tied_weights.items()}
    model = empty_model(job.folder, job.config.dtype, trust_remote_code=job.trust_remote_code)
    use_natural_layout(model, tensors)
    assign(model, tensors)
    return model, KVCache(state_specs(job.config, job.model))


def _compile(model: nn.Module, states: KVCache, spec: GraphSpec, job: CompileJob, scratch: Path) -> None:
    try:
        program = export_layers_once(model, states, spec, OPS)
        plan, constants = lower(program)
        plan = leave_out_dead(plan, spec.tokens, _by_token(spec, job.model.vocab_size))
        known: dict[str, Tensor] = {**program.state_dict, **program.constants, **constants}
        check_plan(plan, {name: dtype_name(each.dtype) for name, each in known.items()})  # as who loads it will
    except Exception as error:  # of whatever the model's code does
        raise RuntimeError(f"graph {spec.name} could not be compiled: {type(error).__name__}: {error}") from error
    used = {buffer.name for buffer in plan.buffers if buffer.kind == "tensor"}
    tensors = {name: known[name] for name in sorted(used)}
    write_plan(scratch / (spec.name + PLAN_SUFFIX), plan, spec, Facts.of(job.config, job.model), tensors)
    if constants:
        save_file(constants, scratch / (spec.name + CONSTANTS_SUFFIX))


def _by_token(spec: GraphSpec, vocab_size: int) -> list[str]:
    """A plan's outputs that have a row per token, by their numbers."""
    names = [each.name for each in spec.outputs(vocab_size)]
    return [str(number) for number, name in enumerate(names) if not spec.has_chunk or name == PROMPT_LOGITS]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Holds Python's garbage collector: the objects of a graph grow with its layers, and it would walk them all many times to free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
