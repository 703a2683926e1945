# SPDX-License-Identifier: Apache-2.0
"""The step module as one `torch.export` program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.export import ExportedProgram

from .attention.kv_cache import KVCache
from .ops import DEFAULT_OPS, StepOps
from .sampling.buffers import Scores
from .spec import SAMPLING_PARAMS, UNIFORMS, GraphSpec
from .step import StepModule, example_inputs
from .tracing.absent_layers import AbsentLayers
from .tracing.alike import NotAlikeError
from .tracing.expand import expand_layers
from .tracing.repeated_layers import LayerTrace, few_layers


logger = logging.getLogger(__name__)


def export_graph(
    model: nn.Module, cache: KVCache, spec: GraphSpec, ops: StepOps = DEFAULT_OPS, scores: Scores | None = None
) -> ExportedProgram:
    """Export a step graph, the source of every compiled target.

    Parameters and buffers are named `model.*`, states `kv_cache.*`, logits for a sampler in another graph `scores.*`, and the slots' last
    tokens `chosen.tokens`.

    Raises:
        RuntimeError: an input has no user in the exported graph, so that it would be ignored.
    """
    module = StepModule(model, cache, spec, ops, scores).eval()
    program = _trace_module(module)
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
    """Export the same program in less time: trace a few of the layers that are shown to be the same.

    Args:
        decompose: rewrites the program, operator by operator; also that of few layers.

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
    """Return the program from a trace of a few layers.

    Args:
        whole: the other layers keep their weights and states, so that they can be traced, too.

    Raises:
        NotAlikeError: such a trace cannot be used.
    """
    absent = None if whole else AbsentLayers(module, module.kv_cache, layers)
    with nullcontext() if absent is None else absent.take_away():
        program = _trace_module(module)
    if layers.is_refused:
        raise NotAlikeError
    program = decompose(program)
    if absent is not None:
        absent.restore_inputs(program)
    expand_layers(program, layers)
    _check_inputs(program, module)
    return program


def _trace_module(module: StepModule) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, example_inputs(module.spec.inputs()), strict=False)


def _check_inputs(program: ExportedProgram, module: StepModule) -> None:
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    others = () if module.scores is None else (SAMPLING_PARAMS, UNIFORMS)  # a sampler's
    for argument, tensor in zip(program.graph_signature.user_inputs, module.spec.inputs(), strict=True):
        if not placeholders[argument].users and tensor.name.split(".")[1] not in others:
            raise RuntimeError(f"graph {module.spec.name}: input {tensor.name} has no user after export")
