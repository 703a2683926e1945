# SPDX-License-Identifier: Apache-2.0
"""From a transformers model to its step graphs: what the model is asked once, and torch.export of a step."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention import LayerRecorder
from .kv_cache import KVCache
from .ops import DEFAULT_OPS, StepOps
from .spec import GraphSpec, ModelSpec
from .step import StepModule, example_inputs


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Runs the model on one token and returns what its graphs need to know.

    Raises:
        ValueError: the model cannot run as step graphs; the reason is named.
    """
    recorder = LayerRecorder()
    token = torch.zeros((1, 1), dtype=torch.int32)
    name = type(model).__name__
    try:
        with torch.inference_mode():
            logits = model(
                input_ids=token, position_ids=token.clone(), use_cache=False, attention_backend=recorder
            ).logits
    except TypeError as error:
        raise ValueError(f"{name} does not pass keyword arguments on to its attention layers: {error}") from error
    expected = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    layers = tuple(recorder.layers)
    if len({layer.layer_idx for layer in layers}) != len(layers) or len(layers) != expected:
        raise ValueError(
            f"{name} cannot be exported: {len(layers)} attention calls were seen for num_hidden_layers={expected}; "
            f"every layer must call transformers' attention interface exactly once"
        )
    return ModelSpec(vocab_size=logits.shape[-1], layers=layers)


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
