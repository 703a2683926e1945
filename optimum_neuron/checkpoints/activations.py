# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model multiply with rounded activations: those whose weights are codes that meet such."""

from __future__ import annotations

import logging

from torch import nn

from ..config import NeuronConfig
from ..graphs.quantized.expert_weights import quantized_weights, round_activations_of
from ..graphs.quantized.modules import QuantizedLinear
from ..graphs.quantized.weight import MEET_CODED


logger = logging.getLogger(__name__)


def check_activations(model: nn.Module, config: NeuronConfig) -> None:
    """Tells how many quantized layers stay with plain activations, where a config asks for others.

    Raises:
        ValueError: all of them do.
    """
    if config.activations is None:
        return
    kinds = [layer.kind for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    kinds += [weight.kind for layer in model.modules() for weight in quantized_weights(layer).values()]
    others = sorted({kind for kind in kinds if kind not in MEET_CODED})
    if not set(kinds) - set(others):
        raise ValueError(
            f"activations={config.activations!r} meet weights that are codes of {' or '.join(MEET_CODED)}, and "
            f"{type(model).__name__} has {' and '.join(others) or 'plain ones'}; leave it out, or quantize to one of them"
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


def round_activations(model: nn.Module, config: NeuronConfig) -> None:
    """Has the layers that can multiply with rounded activations do so, where a config asks for it."""
    if config.activations is None:
        return
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and layer.kind in MEET_CODED:
            layer.activations = config.activations
        for name, weight in quantized_weights(layer).items():
            if weight.kind in MEET_CODED:
                round_activations_of(layer, name, config.activations)
