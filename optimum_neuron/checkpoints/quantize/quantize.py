# SPDX-License-Identifier: Apache-2.0
"""Quantization of a model's linear layers and experts at export, one after another, so that no second copy of the model exists."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import progress
from ...config import NeuronConfig
from ...parity.nonfinite import nonfinite
from ...step.features.codes.expert_weights import is_experts, natural_shape, plain_weights, replace_weights
from ...step.features.codes.formats import WeightFormat, make_room
from ...step.features.codes.modules import QuantizedEmbedding, QuantizedLinear, replace_embedding, replace_linear
from ...step.features.codes.weight import QuantizedWeight
from ...step.one_thread import one_thread
from .calibration import Calibration
from .importance import input_importance
from .rounding import FP8_LARGEST, FP8_LARGEST_ON, round_fp8, round_int4, round_int8


logger = logging.getLogger(__name__)

# Small layers with sensitive weights: routers, and layers that decide how fast a recurrence forgets or which keys are
# selected.
DEFAULT_EXCLUDE = (
    "*.gate", "*.router", "*.router.*", "*.shared_expert_gate",
    "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.dt_proj", "*.x_proj", "*.b_proj", "*.f_a_proj", "*.f_b_proj", "*.indexer.*",
)  # fmt: skip


def quantize(model: PreTrainedModel, config: NeuronConfig, calibration: Calibration | None = None) -> None:
    """Replace linear layers and experts of a model by quantized ones, if a config asks for it.

    With int4, the head, and layers with inputs that groups do not divide, become int8. A table of embeddings that the head shares stays shared
    where it becomes int8.

    Args:
        calibration: a text on which the model runs first, so that weights of int4 are nearest where their inputs are large.

    Raises:
        ValueError: nothing is left to quantize, a pattern excludes nothing, a weight holds NaN or infinity, or the model cannot run on the
            text.
    """
    if config.quantization in (None, "checkpoint"):
        return
    chosen = _choose_layers(model, config)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    rounding = _Rounding(config)
    if calibration is not None:
        rounding.importance = input_importance(model, _in_int4(chosen, config, head), calibration.ids)
    with one_thread(), progress.stage("Quantizing weights", len(chosen)) as advance:
        for name, module in chosen.items():
            if isinstance(module, nn.Linear):
                is_shared = _is_shared(module, head, table)
                weight = rounding.round_weight(f"{name}.weight", module.weight.detach(), finest=module is head)
                replace_linear(model, name, weight)
                if is_shared and weight.kind == "int8":
                    replace_embedding(model, _name_of(model, table), weight)
            else:
                replace_weights(module, dict(_rounded_experts(name, module, rounding)))
            advance(name)
    if rounding.undivided:
        name, inputs = rounding.undivided[0]
        logger.warning(
            "%d weights, as %s with %d inputs, are no whole number of groups of %d: they are int8",
            len(rounding.undivided),
            name,
            inputs,
            config.int4_group_size,
        )
    if rounding.unseen:
        logger.warning(
            "%d weights, as %s, met too few tokens of the calibration text, and are rounded without it",
            len(rounding.unseen),
            rounding.unseen[0],
        )


def formats_of(model: PreTrainedModel, config: NeuronConfig) -> dict[str, WeightFormat]:
    """Return how `quantize` stores the weights of a model, by name and without reading any; raise ValueError as `quantize`."""
    if config.quantization is None:
        return {}
    if config.quantization == "checkpoint":
        raise ValueError(
            "quantization='checkpoint' keeps what a checkpoint's files hold, and its config alone is read here; give the kind of codes, as "
            "quantization='int8', or an artifact"
        )
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    found = {}
    for name, module in _choose_layers(model, config).items():
        if isinstance(module, nn.Linear):
            found[name] = _weight_format(config, module.in_features, finest=module is head)
            if _is_shared(module, head, table) and found[name].kind == "int8":
                found[_name_of(model, table)] = found[name]
        else:
            for own, weight in plain_weights(module).items():
                found[f"{name}.{own}"] = _weight_format(config, natural_shape(module, weight)[-1])
    return found


def make_room_as_quantized(model: PreTrainedModel, config: NeuronConfig) -> None:
    """Give a model without memory the weights that `quantize` would, also without memory; raise ValueError as it does."""
    with torch.device("meta"):
        make_room(model, formats_of(model, config))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    # Only a table that the head shares is quantized.
    if isinstance(table, QuantizedEmbedding) and isinstance(head, QuantizedLinear):
        table.codes, table.scale = head.codes, head.scale


def _choose_layers(model: PreTrainedModel, config: NeuronConfig) -> dict[str, nn.Module]:
    layers = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear or is_experts(module)
    }
    patterns = DEFAULT_EXCLUDE if config.quantization_exclude is None else config.quantization_exclude
    chosen = {name: each for name, each in layers.items() if not any(fnmatchcase(name, one) for one in patterns)}
    _check_patterns(model, config, layers, chosen)
    return chosen


def _in_int4(chosen: dict[str, nn.Module], config: NeuronConfig, head: nn.Module | None) -> dict[str, nn.Module]:
    """Return the layers with a weight that becomes int4."""

    def inputs_of(module: nn.Module) -> list[int]:
        if isinstance(module, nn.Linear):
            return [module.in_features]
        return [natural_shape(module, weight)[-1] for weight in plain_weights(module).values()]

    return {
        name: module
        for name, module in chosen.items()
        if any(_weight_format(config, inputs, finest=module is head).kind == "int4" for inputs in inputs_of(module))
    }


def _is_shared(module: nn.Linear, head: nn.Module | None, table: nn.Module) -> bool:
    return module is head and type(table) is nn.Embedding and table.weight is module.weight


def _weight_format(config: NeuronConfig, inputs: int, *, finest: bool = False) -> WeightFormat:
    """Return the format of a weight with so many inputs; `finest` takes as many bits as there are."""
    group = config.int4_group_size
    if config.quantization == "int4" and not finest and inputs % group == 0:
        return WeightFormat("int4", inputs // group, "float16", config.quantization_zero_point)
    return WeightFormat("fp8" if config.quantization == "fp8" else "int8", 1, "float32", False)


def _rounded_experts(name: str, layer: Any, rounding: _Rounding) -> Iterator[tuple[str, QuantizedWeight]]:
    for own, parameter in plain_weights(layer).items():
        weight = parameter.detach()
        yield own, rounding.round_weight(f"{name}.{own}", weight.transpose(1, 2) if layer.is_transposed else weight)


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def _check_patterns(
    model: PreTrainedModel, config: NeuronConfig, layers: dict[str, nn.Module], chosen: dict[str, nn.Module]
) -> None:
    idle = [one for one in config.quantization_exclude or () if not any(fnmatchcase(name, one) for name in layers)]
    if idle:
        raise ValueError(
            f"quantization_exclude={idle[0]!r} is the name of none of {type(model).__name__}'s {len(layers)} linear layers and experts, "
            f"such as {next(iter(layers), 'none')}; correct it"
        )
    if not chosen:
        raise ValueError(
            f"quantization={config.quantization!r} finds nothing to quantize: {len(layers)} linear layers and experts of "
            f"{type(model).__name__} are all excluded; leave out one of them"
        )


class _Rounding:
    """The rounding of one weight after another as a config asks.

    Attributes:
        undivided: names and inputs of weights that are int8 because groups of int4 do not divide them.
        importance: importance of the inputs of weights by name, where a text gives it.
        unseen: names of weights of int4 without an importance.
    """

    def __init__(self, config: NeuronConfig) -> None:
        self._config = config
        self.undivided: list[tuple[str, int]] = []
        self.importance: dict[str, Tensor] | None = None
        self.unseen: list[str] = []

    def round_weight(self, name: str, weight: Tensor, *, finest: bool = False) -> QuantizedWeight:
        """Round a weight `[..., outputs, inputs]`; `finest` takes as many bits as there are."""
        problem = nonfinite(name, weight)
        if problem is not None:
            raise ValueError(problem)
        kind = _weight_format(self._config, weight.shape[-1], finest=finest).kind
        if kind == "fp8":
            return round_fp8(weight, FP8_LARGEST_ON.get(self._config.target, FP8_LARGEST))
        if kind == "int8":
            if self._config.quantization == "int4" and not finest:
                self.undivided.append((name, weight.shape[-1]))
            return round_int8(weight)
        importance = None if self.importance is None else self.importance.get(name)
        if self.importance is not None and importance is None:
            self.unseen.append(name)
        zero_point = self._config.quantization_zero_point
        try:
            return round_int4(weight, self._config.int4_group_size, zero_point=zero_point, importance=importance)
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}; exclude it by --quantization-exclude (quantization_exclude)"
            ) from error
