# SPDX-License-Identifier: Apache-2.0
"""Exporter and runtime for causal language models on AWS Neuron and on the host CPU. Importing it imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .config import ExportOptions as ExportOptions
    from .config import NeuronConfig as NeuronConfig
    from .core import Request as Request
    from .engine.policy import SchedulerOptions as SchedulerOptions
    from .export.recipe import export_model as export_model
    from .generate.model import NeuronModelForCausalLM as NeuronModelForCausalLM
    from .generate.text_model import TextModel as TextModel
    from .runtime.profile import Profile as Profile
    from .step.spec import SamplingParams as SamplingParams

from .errors import check_system
from .version import __version__ as __version__


_PUBLIC = {
    "ExportOptions": ".config",
    "NeuronConfig": ".config",
    "NeuronModelForCausalLM": ".generate.model",
    "Profile": ".runtime.profile",
    "Request": ".core",
    "SamplingParams": ".step.spec",
    "SchedulerOptions": ".engine.policy",
    "TextModel": ".generate.text_model",
    "export_model": ".export.recipe",
}
__all__ = [
    "ExportOptions", "NeuronConfig", "NeuronModelForCausalLM", "Profile", "Request", "SamplingParams", "SchedulerOptions", "TextModel", "export_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_system()
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
