# SPDX-License-Identifier: Apache-2.0
"""The options of an export: NeuronConfig, fixed when graphs are compiled, and ExportOptions. Imports no torch."""

from __future__ import annotations

from .export_options import ExportOptions
from .graph_options import (
    ACTIVATIONS,
    DTYPES,
    HLO_TARGETS,
    KERNEL_TARGETS,
    LARGEST_SIZE,
    MOST_LOGPROBS,
    NEURON_TARGETS,
    SMALLEST_BLOCK,
    TARGETS,
    TARGETS_WITHOUT_FP8,
    TASKS,
)
from .graph_sizes import LARGEST_SCAN_BLOCK
from .neuron_config import NeuronConfig
from .option import OptionSpec, read_dtype, refuse_unknown, takes_options


__all__ = [
    "ACTIVATIONS", "DTYPES", "HLO_TARGETS", "KERNEL_TARGETS", "LARGEST_SCAN_BLOCK", "LARGEST_SIZE", "MOST_LOGPROBS", "NEURON_TARGETS",
    "SMALLEST_BLOCK", "TARGETS", "TARGETS_WITHOUT_FP8", "TASKS", "ExportOptions", "NeuronConfig", "OptionSpec", "read_dtype",
    "refuse_unknown", "takes_options",
]  # fmt: skip
