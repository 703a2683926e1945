# SPDX-License-Identifier: Apache-2.0
"""The runtimes that can run NEFFs here, and loading with the first that fits a target. Imports none of them before use."""

from __future__ import annotations

from ... import Executable
from ..compile.nxd import NeuronxDistributed, missing_packages
from ..sdk.devices import check_devices, reserve_cores
from ..sdk.packages import NRTPY, TORCH_LITE, package_problem
from .device_executable import Device, DeviceExecutable
from .load_plan import LoadPlan


EXECUTOR, NRT, SPMD = "libtorch_neuronx_lite", "nrtpy", NeuronxDistributed.name
# By target, the preferred one first.
_FITTING = {
    "inf2": (SPMD,),
    "trn1": (SPMD,),
    "trn2": (EXECUTOR, NRT, SPMD),
    "trn3": (EXECUTOR, NRT),
}


def choose_runtime(target: str, provider: str) -> str:
    """The runtime to run a target's graphs with: the one of the packages that compiled them, if it is here.

    Raises:
        RuntimeError: none is here; the message says what each lacks.
    """
    fitting = sorted(_FITTING[target], key=lambda runtime: runtime != provider)
    problems = {runtime: _problem(runtime) for runtime in fitting}
    for runtime, problem in problems.items():
        if problem is None:
            return runtime
    raise RuntimeError(f"nothing here can run graphs on {target}: {'; or '.join(filter(None, problems.values()))}")


def load_graphs(plan: LoadPlan) -> Executable:
    """Loads compiled graphs onto this machine's devices.

    Raises:
        RuntimeError: the devices or packages of this machine do not fit, or a device failed (NeuronRuntimeError).
        FileNotFoundError: a compiled graph is missing.
        ValueError: the weights are not those of the graphs.
    """
    for graph in plan.graphs:
        plan.neff(graph)
    cores = check_devices(plan.target, plan.lnc, plan.world_size)
    runtime = choose_runtime(plan.target, plan.provider)
    if runtime != SPMD and plan.world_size > 1:
        from .ranks import RankedExecutable

        return RankedExecutable(plan, runtime, cores)
    reserve_cores(plan.lnc, plan.target, cores)
    if runtime == SPMD:
        from .nxd_runtime import NxDExecutable

        return NxDExecutable(plan)
    return DeviceExecutable(open_device(runtime, 0, 1), plan)


def open_device(runtime: str, rank: int, world_size: int) -> Device:
    """Starts a runtime in this process, on the core that a rank has."""
    if runtime == EXECUTOR:
        from .executor_runtime import ExecutorDevice

        return ExecutorDevice(rank, world_size)
    from .nrt_runtime import NrtDevice

    return NrtDevice(rank, world_size)


def _problem(runtime: str) -> str | None:
    if runtime == SPMD:
        return missing_packages()
    return package_problem(TORCH_LITE if runtime == EXECUTOR else NRTPY)
