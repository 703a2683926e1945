# SPDX-License-Identifier: Apache-2.0
"""From a transformers model to its step graphs: what the model is asked once, and torch.export of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import PreTrainedModel

from .attention import LayerRecorder
from .experts import no_experts, routing, set_experts
from .interface import attending
from .kv_cache import KVCache
from .masks import UnsupportedModelError
from .model_cache import CacheNeeds
from .ops import DEFAULT_OPS, StepOps
from .refusals import check_layers, check_result
from .spec import GraphSpec, ModelSpec
from .step import StepModule, accepts, example_inputs


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Runs the model on a few tokens and returns what its graphs need to know.

    A model whose weights have data is also run as step graphs, and must compute what transformers' own attention does.

    Raises:
        ValueError: the model cannot run as step graphs; the reason is named.
    """
    try:
        spec = _record(model)
        check_layers(model, spec)
        check_result(model, spec, by_itself=CacheNeeds.of(model).by_itself)
    except UnsupportedModelError as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {error}") from error
    return spec


def look_at(model: PreTrainedModel, call: Callable[..., Any] | None = None) -> ModelSpec:
    """Runs a token with attention and experts that only look on: what each layer keeps, and the size of the vocabulary.

    Args:
        call: runs the model; by default the model itself.
    """
    needs = CacheNeeds.of(model)
    recorder = LayerRecorder(needs.by_itself)
    set_experts(model)
    token = torch.zeros((1, 1), dtype=torch.int32)
    kwargs: dict[str, Any] = {"attention_backend": recorder} if accepts(model, "attention_backend") else {}
    cache = needs.cache(token[0], recorder, recorder)
    if cache is not None:
        kwargs["past_key_values"] = cache
    kwargs |= {"input_ids": token, "position_ids": token.clone(), "use_cache": False}
    with torch.inference_mode(), attending(recorder), routing(no_experts):
        logits: Tensor = (call or model)(**kwargs).logits
    return ModelSpec(logits.shape[-1], tuple(recorder.layers), tuple(recorder.convolutions))


def _record(model: PreTrainedModel) -> ModelSpec:
    try:
        return look_at(model)
    except (UnsupportedModelError, DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"it fails on a token with its position and no cache: {error}") from error


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
