# SPDX-License-Identifier: Apache-2.0
"""Quantization of a model's linear layers and experts at export, one after another, so that no second copy of the model exists."""

from __future__ import annotations

import dataclasses
import logging
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import progress
from ...arrays import give_back_heap
from ...config import ACTIVATIONS, NeuronConfig
from ...parity.nonfinite import nonfinite
from ...step.features.codes.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    WeightFormat,
    is_experts,
    make_room,
    plain_weights,
    quantized_weights,
    replace_module,
    replace_weights,
    round_activations_of,
)
from ...step.features.codes.weight import MEET_CODED, QuantizedWeight
from .calibration import Calibration, input_importance
from .rounding import FP8_LARGEST, FP8_LARGEST_ON, round_fp8, round_int4, round_int8


logger = logging.getLogger(__name__)

# Small layers with sensitive weights: routers, and layers that decide how fast a recurrence forgets or which keys are
# selected.
DEFAULT_EXCLUDE = (
    "*.gate", "*.router", "*.router.*", "*.shared_expert_gate",
    "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.dt_proj", "*.x_proj", "*.b_proj", "*.f_a_proj", "*.f_b_proj", "*.indexer.*",
)  # fmt: skip


def quantize(model: PreTrainedModel, config: NeuronConfig, calibration: Calibration | None = None) -> None:
    """Replace linear layers and experts of a model by quantized ones, if a config asks for it; nearest where inputs are large on a text.

    With int4, the head, and layers with inputs that groups do not divide, become int8. A table of embeddings that the head shares stays shared
    where it becomes int8. Raise ValueError where nothing is left to quantize, a pattern excludes nothing, a weight is not
    finite, or the model cannot run on the text.
    """
    if config.quantization in (None, "checkpoint"):
        return
    chosen = _choose_layers(model, config)
    formats = _choose_formats(model, config, chosen)
    sizes = {
        key: weight.shape[-1] for name, module in chosen.items() for key, weight in _weights_of(name, module).items()
    }
    in_int4 = [key for key in sizes if formats[key.removesuffix(".weight")].kind == "int4"]
    head, table = _name_of(model, model.get_output_embeddings()), _name_of(model, model.get_input_embeddings())
    importance: dict[str, Tensor] = {}
    if calibration is not None:
        coarse = {name: module for name, module in chosen.items() if _weights_of(name, module).keys() & set(in_int4)}
        importance = input_importance(model, coarse, calibration.ids)
    with progress.stage("Quantizing weights", len(chosen)) as advance:
        for name, module in chosen.items():
            rounded = {
                key: _round_weight(key, weight, formats[key.removesuffix(".weight")], config, importance.get(key))
                for key, weight in _weights_of(name, module).items()
            }
            if isinstance(module, nn.Linear):
                replace_module(model, name, rounded[f"{name}.weight"])
                if name == head and table in formats:
                    replace_module(model, table, rounded[f"{name}.weight"])
            else:
                replace_weights(module, {key.rpartition(".")[2]: each for key, each in rounded.items()})
            del rounded  # in files now
            give_back_heap()
            advance(name)
    undivided = [key for key in sizes if key not in in_int4 and key != f"{head}.weight"]
    if config.quantization == "int4" and undivided:
        logger.warning(
            f"{len(undivided)} weights, as {undivided[0]} with {sizes[undivided[0]]} inputs, are no whole number of groups of "
            f"{config.int4_group_size}: they are int8"
        )
    unseen = [key for key in in_int4 if calibration is not None and key not in importance]
    if unseen:
        logger.warning(
            f"{len(unseen)} weights, as {unseen[0]}, met too few tokens of the calibration text, and are rounded without it"
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
    return _choose_formats(model, config, _choose_layers(model, config))


def _choose_formats(
    model: PreTrainedModel, config: NeuronConfig, layers: dict[str, nn.Module]
) -> dict[str, WeightFormat]:
    """Return formats by name: a linear layer's, a weight's of experts, and that of a table of embeddings that shares the head's codes."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    plain = WeightFormat("fp8" if config.quantization == "fp8" else "int8", 1, "float32", False)
    found = {}
    for name, module in layers.items():
        for key, weight in _weights_of(name, module).items():
            groups, rest = divmod(weight.shape[-1], config.int4_group_size)
            is_int4 = config.quantization == "int4" and module is not head and not rest
            form = WeightFormat("int4", groups, "float16", config.quantization_zero_point) if is_int4 else plain
            found[key.removesuffix(".weight")] = form
        is_shared = module is head and type(table) is nn.Embedding and table.weight is module.weight
        if is_shared and found[name].kind == "int8":
            found[_name_of(model, table)] = found[name]
    return found


def _weights_of(name: str, layer: Any) -> dict[str, Tensor]:
    """Return the weights `[..., outputs, inputs]` of a linear layer or of experts, by name."""
    if isinstance(layer, nn.Linear):
        return {f"{name}.weight": layer.weight.detach()}
    found = {f"{name}.{own}": weight.detach() for own, weight in plain_weights(layer).items()}
    return {key: each.transpose(1, 2) for key, each in found.items()} if layer.is_transposed else found


def make_room_as_quantized(model: PreTrainedModel, config: NeuronConfig) -> None:
    """Give a model without memory the weights that `quantize` would, also without memory; raise ValueError as it does."""
    with torch.device("meta"):
        make_room(model, formats_of(model, config))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    # Only a table that the head shares is quantized.
    if isinstance(table, QuantizedEmbedding) and isinstance(head, QuantizedLinear):
        table.codes, table.scale = head.codes, head.scale


def _choose_layers(model: PreTrainedModel, config: NeuronConfig) -> dict[str, nn.Module]:
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear or is_experts(each)}
    patterns = DEFAULT_EXCLUDE if config.quantization_exclude is None else config.quantization_exclude
    chosen = {name: each for name, each in layers.items() if not any(fnmatchcase(name, one) for one in patterns)}
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
    return chosen


def _name_of(model: nn.Module, module: nn.Module | None) -> str:
    return next((name for name, each in model.named_modules() if each is module), "")


def _round_weight(
    name: str, weight: Tensor, form: WeightFormat, config: NeuronConfig, importance: Tensor | None
) -> QuantizedWeight:
    problem = nonfinite(name, weight)
    if problem is not None:
        raise ValueError(problem)
    if form.kind == "fp8":
        return round_fp8(weight, FP8_LARGEST_ON.get(config.target, FP8_LARGEST))
    if form.kind == "int8":
        return round_int8(weight)
    zero_point = config.quantization_zero_point
    try:
        return round_int4(weight, config.int4_group_size, zero_point=zero_point, importance=importance)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; exclude it by --quantization-exclude (quantization_exclude)") from error


def settle_activations(model: nn.Module, config: NeuronConfig, *, by_default: bool) -> NeuronConfig:
    """Return a config with the type that activations are rounded to, or None; "auto" rounds them `by_default`.

    Raise ValueError where the config asks for rounded activations, and no weight of the model meets them.
    """
    kinds = [layer.kind for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    kinds += [weight.kind for layer in model.modules() for weight in quantized_weights(layer).values()]
    others = sorted({kind for kind in kinds if kind not in MEET_CODED})
    meets = bool(set(kinds) - set(others))
    asked = config.activations
    if asked == "auto":
        config = dataclasses.replace(config, activations=ACTIVATIONS[0] if meets and by_default else None)
    if config.activations is None:
        if asked is None and meets and by_default:
            logger.warning(
                "activations stay as they are where they meet weights of int8 or int4: this CPU computes that slower than with activations "
                "rounded to int8, and may be slower than with plain weights of bfloat16; leave out --activations none to round them"
            )
        return config
    if not meets:
        raise ValueError(
            f"activations={config.activations!r} meet weights that are codes of {' or '.join(MEET_CODED)}, and "
            f"{type(model).__name__} has {' and '.join(others) or 'plain ones'}; leave it out, or quantize to one of them"
        )
    if asked == "auto":
        logger.warning(
            f"activations are rounded to {config.activations} where they meet weights of {' or '.join(MEET_CODED)}: this is faster on this "
            f"CPU, and less exact; --activations none (activations='none') keeps them"
        )
    if others:
        logger.warning(
            f"{sum(kind in others for kind in kinds)} of {len(kinds)} quantized weights are {' and '.join(others)}, which activations of "
            f"{config.activations} do not meet: they multiply with plain ones"
        )
    return config


def round_activations(model: nn.Module, config: NeuronConfig) -> None:
    """Have the layers that can multiply with rounded activations do so if a config asks for it."""
    if config.activations is None:
        return
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and layer.kind in MEET_CODED:
            layer.activations = config.activations
        for name, weight in quantized_weights(layer).items():
            if weight.kind in MEET_CODED:
                round_activations_of(layer, name, config.activations)
