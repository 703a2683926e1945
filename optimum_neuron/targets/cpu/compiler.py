# SPDX-License-Identifier: Apache-2.0
"""Plans of an artifact's graphs, made through the compile cache, with the facts that they were made for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from ... import progress
from ...artifact.artifact import WEIGHTS_NAME
from ...artifact.schema import TEXT, anything, first_difference, record, shown
from ...artifact.skeleton import assign, empty_model
from ...artifact.tensor_file import stored_tensors
from ...checkpoints.mapped import map_tensors
from ...config import NeuronConfig
from ...kernels.lower.lower import lower
from ...step.attention.kv_cache import KVCache
from ...step.model_spec import SECTIONS, ModelSpec
from ...step.one_thread import one_thread
from ...step.program import export_layers_once
from ...step.spec import PROMPT_LOGITS, GraphSpec
from ...step.state_specs import state_specs
from .. import CompileJob
from ..cache.entries import About
from ..cache.store import CompileCache
from .layout import use_natural_layout
from .native_library import load_kernels
from .ops import OPS
from .plan_keys import plan_keys


_FACTS = record(
    {
        "graph": record(dict.fromkeys((field.name for field in fields(GraphSpec)), anything), closed=True),
        "model": record(dict.fromkeys(("vocab_size", "num_embeddings", *SECTIONS), anything), closed=True),
        "dtype": TEXT,
    },
    closed=True,
)


@dataclass(frozen=True)
class PlanFacts:
    """The facts that the plan of a graph depends on."""

    graph: GraphSpec
    model: ModelSpec
    dtype: str

    @classmethod
    def collect(cls, graph: GraphSpec, config: NeuronConfig, model: ModelSpec) -> PlanFacts:
        return cls(graph, model, config.dtype)

    def to_dict(self) -> dict[str, Any]:
        lists: dict[str, Any] = {section: [] for section in SECTIONS}
        return {"graph": asdict(self.graph), "model": lists | self.model.to_dict(), "dtype": self.dtype}

    def check(self, found: Mapping[str, Any]) -> None:
        """Raise ValueError where a plan was made for other facts."""
        _FACTS("the plan", found)
        difference = first_difference(found, self.to_dict())
        if difference is not None:
            name, made, asked = difference
            raise ValueError(f"it was compiled for {name}={shown(made)}, and the artifact has {shown(asked)}")


logger = logging.getLogger(__name__)

CACHE_KIND = "cpu"
PLAN_SUFFIX, CONSTANTS_SUFFIX = ".json", ".safetensors"


def compile_graphs(job: CompileJob) -> dict[str, Any]:
    """Write a plan per graph into the job's `graphs/`, and the constants of those that have some; return `target_data`.

    Raises:
        RuntimeError: a graph could not be compiled; the graph is named.
        OSError: the compile cache cannot be used.
    """
    load_kernels()  # what the plans call: better missed now than when the artifact is loaded
    cache = CompileCache(CACHE_KIND)
    folder = job.folder / "graphs"
    keys = plan_keys(job, stored_tensors(job.folder / WEIGHTS_NAME))
    missing = [spec for spec in job.graphs if not cache.fetch(keys[spec.name], folder, spec.name, PLAN_SUFFIX)]
    logger.info(
        "%d of %d graphs are in the compile cache %s", len(job.graphs) - len(missing), len(job.graphs), cache.folder
    )
    if missing:
        model, states = _load_model(job)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        with one_thread(), cache.scratch() as scratch, progress.stage("Compiling graphs", len(missing)) as advance:
            for spec in missing:
                with _hold_collector():
                    _compile_graph(model, states, spec, job, scratch)
                cache.store(keys[spec.name], scratch, spec.name, folder, About(spec.name, CACHE_KIND, versions))
                advance(spec.name)
    return {}


def _load_model(job: CompileJob) -> tuple[nn.Module, KVCache]:
    """Return the model over the weights that the export has written: they are mapped, not copied."""
    tensors = map_tensors(job.folder / WEIGHTS_NAME)
    tensors |= {alias: tensors[name] for alias, name in job.tied_weights.items()}
    model = empty_model(job.folder, job.config.dtype, trust_remote_code=job.trust_remote_code)
    use_natural_layout(model, tensors)
    assign(model, tensors)
    return model, KVCache(state_specs(job.config, job.model))


def _compile_graph(model: nn.Module, states: KVCache, spec: GraphSpec, job: CompileJob, scratch: Path) -> None:
    try:
        program = export_layers_once(model, states, spec, OPS)
        plan, constants = lower(program, spec.tokens, _list_outputs_by_token(spec, job.model.vocab_size))
        known: dict[str, Tensor] = {**program.state_dict, **program.constants, **constants}
        plan.check(known)  # as when it is loaded
    except Exception as error:  # of whatever the model's code does
        raise RuntimeError(f"graph {spec.name} could not be compiled: {type(error).__name__}: {error}") from error
    plan.save(scratch / (spec.name + PLAN_SUFFIX), PlanFacts.collect(spec, job.config, job.model).to_dict(), known)
    if constants:
        save_file(constants, scratch / (spec.name + CONSTANTS_SUFFIX))


def _list_outputs_by_token(spec: GraphSpec, vocab_size: int) -> list[str]:
    """Return the numbers of the outputs that have a row per token."""
    names = [each.name for each in spec.outputs(vocab_size)]
    return [str(number) for number, name in enumerate(names) if not spec.has_chunk or name == PROMPT_LOGITS]


@contextmanager
def _hold_collector() -> Iterator[None]:
    """Hold Python's garbage collector: it would walk the many objects of a graph again and again to free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
