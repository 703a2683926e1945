# SPDX-License-Identifier: Apache-2.0
"""Loads compiled graphs onto this machine's devices, by the first runtime that fits, in processes of their own."""

from __future__ import annotations

from ... import Executable
from ...rank_options import IN_ENVIRONMENT, RankOptions
from ..sdk.devices import check_devices
from ..sdk.stacks import NXD, choose_runtime
from .interpreter import find_interpreter
from .load_plan import LoadPlan
from .ranks import RankedExecutable


def load_graphs(plan: LoadPlan, options: RankOptions = IN_ENVIRONMENT) -> Executable:
    """Loads compiled graphs onto this machine's devices.

    Raises:
        RuntimeError: the devices, interpreter or packages do not fit, or a device failed (NeuronRuntimeError).
        FileNotFoundError: a compiled graph is missing.
        ValueError: the weights are not those of the graphs, or an option has no such value.
    """
    for graph in plan.graphs:
        plan.neff(graph)
    cores = check_devices(plan.target, plan.lnc, plan.world_size)
    interpreter = find_interpreter(options.python)
    runtime = choose_runtime(plan.target, interpreter.found, interpreter.path)
    # NxDModel holds all ranks in one process; the others join theirs through the device's own collectives.
    groups = [tuple(range(plan.world_size))] if runtime == NXD else [(rank,) for rank in range(plan.world_size)]
    return RankedExecutable(plan, runtime, interpreter, groups, cores, options)
