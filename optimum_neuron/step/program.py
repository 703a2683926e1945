# SPDX-License-Identifier: Apache-2.0
"""A step graph as a torch.export program, the source of every compiled target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.export import ExportedProgram

from .kv_cache import KVCache
from .ops import DEFAULT_OPS, StepOps
from .sampling.scores import Scores
from .spec import SAMPLING_PARAMS, UNIFORMS, GraphSpec
from .step import StepModule, example_inputs
from .tracing.absent_layers import AbsentLayers
from .tracing.expand import expand
from .tracing.layer_names import NotAlikeError
from .tracing.repeated_layers import LayerTrace, few_layers


logger = logging.getLogger(__name__)


def export_graph(
    model: nn.Module, cache: KVCache, spec: GraphSpec, ops: StepOps = DEFAULT_OPS, scores: Scores | None = None
) -> ExportedProgram:
    """The step graph as one `torch.export` program, the source of every compiled target.

    Parameters and buffers are named `model.*`, KV state `kv_cache.*`, logits that are left for a sampler
    `scores.*`, and the slots' last tokens `chosen.tokens`.

    Raises:
        RuntimeError: an input has no user in the exported graph, so that it would be silently ignored.
    """
    module = StepModule(model, cache, spec, ops, scores).eval()
    program = _trace(module)
    _check_inputs(program, module)
    return program


def export_layers_once(
    model: nn.Module,
    cache: KVCache,
    spec: GraphSpec,
    ops: StepOps = DEFAULT_OPS,
    scores: Scores | None = None,
    decompose: Callable[[ExportedProgram], ExportedProgram] = lambda program: program,
) -> ExportedProgram:
    """The same program in less time: of layers that are the same, and are shown to be, a few are traced.

    Args:
        decompose: what is done to the program, operator by operator; to few layers as well.

    Raises:
        RuntimeError: as `export_graph`.
    """
    module = StepModule(model, cache, spec, ops, scores).eval()
    for whole in (False, True):
        with few_layers(module.model) as layers:
            if not layers.templates:  # no trace would be shorter
                break
            try:
                return _few_traced(module, layers, decompose, whole=whole)
            except (
                Exception
            ) as error:  # of whatever the model's code does: if it is not of the short cut, it will come again
                last = whole or layers.is_refused  # else it may be for want of a layer's weights
                left = "all layers are traced" if last else "all layers have their weights"
                logger.debug("graph %s: %s (%s: %s)", spec.name, left, type(error).__name__, error)
                if last:
                    break
    return decompose(export_graph(model, cache, spec, ops, scores))


def _few_traced(
    module: StepModule,
    layers: LayerTrace,
    decompose: Callable[[ExportedProgram], ExportedProgram],
    *,
    whole: bool,
) -> ExportedProgram:
    """The program from a trace of a few layers.

    Args:
        whole: the other layers keep their weights and states meanwhile, so that they can be traced, too.

    Raises:
        NotAlikeError: such a trace cannot be used.
    """
    absent = None if whole else AbsentLayers(module, layers)
    with nullcontext() if absent is None else absent.away():
        program = _trace(module)
    if layers.is_refused:
        raise NotAlikeError
    program = decompose(program)
    if absent is not None:
        absent.restore(program)
    expand(program, layers)
    _check_inputs(program, module)
    return program


def _trace(module: StepModule) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, example_inputs(module.spec.inputs()), strict=False)


def _check_inputs(program: ExportedProgram, module: StepModule) -> None:
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    others = () if module.scores is None else (SAMPLING_PARAMS, UNIFORMS)  # a sampler's
    for argument, tensor in zip(program.graph_signature.user_inputs, module.spec.inputs(), strict=True):
        if not placeholders[argument].users and tensor.name.split(".")[1] not in others:
            raise RuntimeError(f"graph {module.spec.name}: input {tensor.name} has no user after export")
