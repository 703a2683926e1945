# SPDX-License-Identifier: Apache-2.0
"""The choice of layers that multiply with rounded activations."""

from __future__ import annotations

import dataclasses
import logging

from torch import nn

from ...config import ACTIVATIONS, NeuronConfig
from ...step.features.codes.expert_weights import quantized_weights, round_activations_of
from ...step.features.codes.modules import QuantizedLinear
from ...step.features.codes.weight import MEET_CODED


logger = logging.getLogger(__name__)


def settle_activations(model: nn.Module, config: NeuronConfig, *, by_default: bool) -> NeuronConfig:
    """Return a config with the type that activations are rounded to, or None.

    Args:
        model: the exported model, with its quantized layers.
        by_default: the value of "auto": the target multiplies codes faster with rounded activations here.

    Raises:
        ValueError: the config asks for rounded activations, and no weight of the model meets them.
    """
    kinds = [layer.kind for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    kinds += [weight.kind for layer in model.modules() for weight in quantized_weights(layer).values()]
    others = sorted({kind for kind in kinds if kind not in MEET_CODED})
    meets = bool(set(kinds) - set(others))
    asked = config.activations
    if asked == "auto":
        chosen = ACTIVATIONS[0] if meets and by_default else None
        config = dataclasses.replace(config, activations=chosen)
    if config.activations is None:
        return config
    if not meets:
        raise ValueError(
            f"activations={config.activations!r} meet weights that are codes of {' or '.join(MEET_CODED)}, and "
            f"{type(model).__name__} has {' and '.join(others) or 'plain ones'}; leave it out, or quantize to one of them"
        )
    if asked == "auto":
        logger.warning(
            "activations are rounded to %s where they meet weights of %s: this is faster on this CPU, and less exact; --activations none "
            "(activations='none') keeps them",
            config.activations,
            " or ".join(MEET_CODED),
        )
    plain = sum(kind in others for kind in kinds)
    if plain:
        logger.warning(
            "%d of %d quantized weights are %s, which activations of %s do not meet: they multiply with plain ones",
            plain,
            len(kinds),
            " and ".join(others),
            config.activations,
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
