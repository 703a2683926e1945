# SPDX-License-Identifier: Apache-2.0
"""The options of an export: NeuronConfig, fixed when graphs are compiled, and ExportOptions. Imports no torch."""

from __future__ import annotations

from .export_options import ExportOptions as ExportOptions
from .graph_options import ACTIVATIONS as ACTIVATIONS
from .graph_options import DTYPES as DTYPES
from .graph_options import HLO_TARGETS as HLO_TARGETS
from .graph_options import KERNEL_TARGETS as KERNEL_TARGETS
from .graph_options import LARGEST_SIZE as LARGEST_SIZE
from .graph_options import MOST_LOGPROBS as MOST_LOGPROBS
from .graph_options import NEURON_TARGETS as NEURON_TARGETS
from .graph_options import SMALLEST_BLOCK as SMALLEST_BLOCK
from .graph_options import TARGETS as TARGETS
from .graph_options import TASKS as TASKS
from .graph_sizes import LARGEST_SCAN_BLOCK as LARGEST_SCAN_BLOCK
from .neuron_config import NeuronConfig as NeuronConfig
from .option import OptionSpec as OptionSpec
from .option import read_dtype as read_dtype
from .option import refuse_unknown as refuse_unknown
from .option import takes_options as takes_options
