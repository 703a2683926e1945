# SPDX-License-Identifier: Apache-2.0
"""The options of an export: NeuronConfig, fixed when graphs are compiled, and ExportOptions. Imports no torch."""

from __future__ import annotations

from .choices import ACTIVATIONS as ACTIVATIONS
from .choices import DTYPES as DTYPES
from .choices import HLO_TARGETS as HLO_TARGETS
from .choices import INT4_GROUP_SIZES as INT4_GROUP_SIZES
from .choices import KERNEL_TARGETS as KERNEL_TARGETS
from .choices import KV_CACHE_DTYPES as KV_CACHE_DTYPES
from .choices import LARGEST_SIZE as LARGEST_SIZE
from .choices import MOST_LOGPROBS as MOST_LOGPROBS
from .choices import NEURON_TARGETS as NEURON_TARGETS
from .choices import QUANTIZATIONS as QUANTIZATIONS
from .choices import SMALLEST_BLOCK as SMALLEST_BLOCK
from .choices import TARGETS as TARGETS
from .choices import TARGETS_WITHOUT_FP8 as TARGETS_WITHOUT_FP8
from .choices import TASKS as TASKS
from .export_options import ExportOptions as ExportOptions
from .graph_sizes import LARGEST_SCAN_BLOCK as LARGEST_SCAN_BLOCK
from .neuron_config import NeuronConfig as NeuronConfig
from .option import OptionSpec as OptionSpec
from .option import read_dtype as read_dtype
from .option import refuse_unknown as refuse_unknown
from .option import takes_options as takes_options
