# SPDX-License-Identifier: Apache-2.0
"""Fake of torch-neuronx 2.9: importing it registers torch.classes.neuron and torch.ops.neuron."""

from __future__ import annotations

import os
import types

import torch

from . import spmd


if "NEURON_RT_VISIBLE_CORES" not in os.environ and "NEURON_RT_NUM_CORES" not in os.environ:
    raise RuntimeError("the process would take all cores")

__version__ = "2.9.0.2.15.32035"


def _uninstall() -> None:
    """For tests: what importing did, undone."""
    vars(torch.classes).pop("neuron", None)
    vars(torch.ops).pop("neuron", None)


torch.classes.neuron = types.SimpleNamespace(SPMDModel=spmd.SPMDModel)
torch.ops.neuron = types.SimpleNamespace(_parallel_load=spmd.parallel_load)
