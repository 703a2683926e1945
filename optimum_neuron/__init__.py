# SPDX-License-Identifier: Apache-2.0
"""Exporter and runtime for causal language models on AWS Neuron and on the host CPU. Importing it imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .config import NeuronConfig as NeuronConfig
    from .export import export_model as export_model
    from .modeling import NeuronModelForCausalLM as NeuronModelForCausalLM

__version__ = "0.1.0"

_PUBLIC = {"NeuronConfig": ".config", "NeuronModelForCausalLM": ".modeling", "export_model": ".export"}
__all__ = ["NeuronConfig", "NeuronModelForCausalLM", "export_model"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
