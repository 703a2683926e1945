# SPDX-License-Identifier: Apache-2.0
"""A model's linear layers quantized at export: which, to what, and one after another, so that no second copy of the model exists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import progress
from ..config import NeuronConfig
from ..graphs.one_thread import one_thread
from ..graphs.quantized.modules import replace_linear
from ..graphs.quantized.weight import QuantizedWeight
from .rounding import round_fp8, round_int4, round_int8


logger = logging.getLogger(__name__)

# Layers with few weights on whose last bits much depends: routers, and what decides how fast a recurrence forgets or which keys are
# selected.
DEFAULT_EXCLUDE = (
    "*.gate", "*.router", "*.router.*", "*.shared_expert_gate",
    "*.in_proj_a", "*.in_proj_b", "*.in_proj_ba", "*.dt_proj", "*.x_proj", "*.b_proj", "*.f_a_proj", "*.f_b_proj", "*.indexer.*",
)  # fmt: skip


def quantize(model: PreTrainedModel, config: NeuronConfig) -> None:
    """Replaces linear layers of a model by quantized ones, as a config asks; does nothing where it asks for none.

    Of int4, the head, and layers whose inputs the groups do not divide, become int8.

    Raises:
        ValueError: nothing is left to quantize, a pattern excludes nothing, or a weight holds NaN or infinity.
    """
    if config.quantization is None:
        return
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    patterns = DEFAULT_EXCLUDE if config.quantization_exclude is None else config.quantization_exclude
    chosen = {name: each for name, each in layers.items() if not any(fnmatchcase(name, one) for one in patterns)}
    _check(model, config, layers, chosen)
    head = model.get_output_embeddings()
    undivided = []
    with one_thread(), progress.stage("Quantizing weights", len(chosen)) as advance:
        for name, module in chosen.items():
            rounded = _rounding(config)
            if config.quantization == "int4" and (module is head or module.in_features % config.int4_group_size):
                undivided += [name] if module is not head else []
                rounded = round_int8
            replace_linear(model, name, _rounded(name, module.weight.detach(), rounded))
            advance(name)
    if undivided:
        logger.warning(
            "%d layers, as %s with %d inputs, are no whole number of groups of %d: they are int8",
            len(undivided),
            undivided[0],
            layers[undivided[0]].in_features,
            config.int4_group_size,
        )


def _check(
    model: PreTrainedModel, config: NeuronConfig, layers: dict[str, nn.Linear], chosen: dict[str, nn.Linear]
) -> None:
    idle = [one for one in config.quantization_exclude or () if not any(fnmatchcase(name, one) for name in layers)]
    if idle:
        raise ValueError(
            f"quantization_exclude={idle[0]!r} is the name of none of {type(model).__name__}'s {len(layers)} linear layers, such as "
            f"{next(iter(layers), 'none')}; correct it"
        )
    if not chosen:
        raise ValueError(
            f"quantization={config.quantization!r} finds nothing to quantize: {len(layers)} linear layers of {type(model).__name__} "
            f"are all excluded; leave out one of them"
        )


def _rounding(config: NeuronConfig) -> Callable[[Tensor], QuantizedWeight]:
    if config.quantization == "int4":
        return lambda weight: round_int4(weight, config.int4_group_size, zero_point=config.quantization_zero_point)
    return {"int8": round_int8, "fp8": round_fp8}[config.quantization or ""]


def _rounded(name: str, weight: Tensor, rounded: Callable[[Tensor], QuantizedWeight]) -> QuantizedWeight:
    count = weight.numel() - int(weight.isfinite().sum())
    if count:
        raise ValueError(
            f"{name}.weight holds NaN or infinity in {count:,} of {weight.numel():,} places; repair it, or download it again"
        )
    try:
        return rounded(weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; exclude it by --quantization-exclude (quantization_exclude)") from error
