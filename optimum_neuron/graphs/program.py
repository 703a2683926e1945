# SPDX-License-Identifier: Apache-2.0
"""A step graph as a torch.export program, the source of every compiled target."""

from __future__ import annotations

import torch
from torch import nn

from .kv_cache import KVCache
from .ops import DEFAULT_OPS, StepOps
from .spec import GraphSpec
from .step import StepModule, example_inputs


def export_graph(
    model: nn.Module, cache: KVCache, spec: GraphSpec, ops: StepOps = DEFAULT_OPS
) -> torch.export.ExportedProgram:
    """The step graph as one `torch.export` program, the source of every compiled target.

    Parameters and buffers are named `model.*`, KV state `kv_cache.*`.

    Raises:
        RuntimeError: an input has no user in the exported graph, so that it would be silently ignored.
    """
    module = StepModule(model, cache, spec, ops).eval()
    with torch.no_grad():
        program = torch.export.export(module, example_inputs(spec.inputs()), strict=False)
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for argument, tensor in zip(program.graph_signature.user_inputs, spec.inputs(), strict=True):
        if not placeholders[argument].users:
            raise RuntimeError(f"graph {spec.name}: input {tensor.name} has no user after export")
    return program
