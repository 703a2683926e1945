# SPDX-License-Identifier: Apache-2.0
"""Models over an artifact's compiled graphs: the surface of transformers, and one that streams text without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .model import NeuronModelForCausalLM as NeuronModelForCausalLM


def __getattr__(name: str) -> Any:
    if name != "NeuronModelForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .model import NeuronModelForCausalLM

    return NeuronModelForCausalLM
