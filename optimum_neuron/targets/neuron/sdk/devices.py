# SPDX-License-Identifier: Apache-2.0
"""The Neuron devices of this machine, and whether an artifact's graphs fit them. Starts no runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hardware import CHIPS, LNC_VARIABLE, has_paired_cores


VISIBLE_CORES, NUMBER_OF_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
# The list as AWS's vLLM plugin takes it (SDK 2.32, vllm-neuron/docs/tutorials/tutorial-gpt-oss.md), of logical cores as well.
VISIBLE_DEVICES = "NEURON_VISIBLE_DEVICES"
_LOW_LATENCY_CPUS = "NEURON_RT_LOW_LATENCY_TASKS_CPU_AFFINITY"
_DEVICE_FOLDER = Path("/dev")
_PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
_LIST_TOOL = "/opt/aws/neuron/bin/neuron-ls"  # where its package puts it; not always on PATH


@dataclass(frozen=True)
class NeuronDevices:
    """The Neuron devices of a machine.

    `generation` is None where neither neuron-ls nor the firmware shows it, `physical_cores`, of all devices together, where it is unknown.
    """

    generation: str | None
    devices: int
    physical_cores: int | None


def find_devices() -> NeuronDevices | None:
    """Return the machine's Neuron devices, or None."""
    listed = _list_devices()
    nodes = [node for node in _DEVICE_FOLDER.glob("neuron*") if node.name.removeprefix("neuron").isdigit()]
    if not listed and not nodes:
        return None
    instances = [str(entry["instance_type"]) for entry in listed if entry.get("instance_type")]
    if not instances:
        with suppress(OSError):
            instances = [_PRODUCT_NAME.read_text(encoding="ascii", errors="replace").strip()]
    generation = next((name for name in CHIPS if instances and instances[0].startswith(name)), None)
    if listed:
        # The tool counts logical cores, of a size that it shows where there is a choice.
        cores = [int(entry.get("nc_count", 0)) * int(entry.get("logical_neuroncore_config") or 1) for entry in listed]
        return NeuronDevices(generation, len(listed), sum(cores))
    chip = CHIPS.get(generation or "")
    physical = None if chip is None else len(nodes) * chip.cores * chip.physical_cores
    return NeuronDevices(generation, len(nodes), physical)


def resolve_neuron_target(name: str) -> str:
    """Return the Neuron target of a name; "auto" is this machine's, or raises ValueError where it has none that is known."""
    if name == "auto":
        found = find_devices()
        if found is None or found.generation is None:
            what = "no Neuron device" if found is None else "Neuron devices of an unknown generation"
            raise ValueError(f"target='auto': this machine has {what}; name one of {', '.join(CHIPS)}")
        return found.generation
    if name not in CHIPS:
        raise ValueError(f"target={name!r} is no Neuron device; name one of {', '.join(CHIPS)}")
    return name


def resolve_lowered_target(name: str) -> str:
    """Return the target of graphs and rules: as `resolve_neuron_target`, or "hlo"."""
    return name if name == "hlo" else resolve_neuron_target(name)


def check_devices(target: str, lnc: int, world_size: int, replicas: int = 1) -> list[int]:
    """Return the logical cores that the `world_size` ranks of each replica take, one each.

    Raise RuntimeError where this machine cannot run graphs compiled for `target` with logical cores of `lnc` physical ones.
    """
    found = find_devices()
    if found is None:
        raise RuntimeError(
            f"the artifact was compiled for {target}, and this machine has no Neuron device; run it on a {target} "
            f"instance, or export the model with target='cpu' or 'hlo' to run it here"
        )
    if found.generation not in (None, target):
        raise RuntimeError(
            f"the artifact was compiled for {target}, and this machine has {found.generation} devices; export the "
            f"model with target={found.generation!r}"
        )
    wanted = os.environ.get(LNC_VARIABLE)
    if has_paired_cores(target) and wanted is not None and wanted != str(lnc):
        raise RuntimeError(
            f"the artifact was compiled for {LNC_VARIABLE}={lnc}, and it is set to {wanted}; set it to {lnc}, or export "
            f"the model again"
        )
    cores = _take_cores(None if found.physical_cores is None else found.physical_cores // lnc, world_size, replicas)
    variable = _visible_variable()
    if variable is not None:
        _check_groups(variable, cores, world_size, CHIPS[target].cores * CHIPS[target].physical_cores // lnc)
    return cores


def take_replica_cores(replica: int, world_size: int) -> None:
    """Make the process of a replica take its own cores, which follow those of the replicas before it on this machine.

    Raise RuntimeError where fewer are visible.
    """
    if replica == 0 and _visible_variable() is None:
        return  # the first ones, which a process takes by itself
    last = (replica + 1) * world_size
    show_cores(_take_cores(None, last)[replica * world_size :])


def show_cores(cores: Sequence[int]) -> None:
    """Make these the cores that this process and its children see."""
    os.environ.pop(VISIBLE_DEVICES, None)
    os.environ[VISIBLE_CORES] = ",".join(map(str, cores))  # Ray reads no ranges


def _visible_variable() -> str | None:
    """Return the variable that names the visible cores, or None; raise ValueError where two name different ones."""
    given = {name: os.environ[name] for name in (VISIBLE_CORES, VISIBLE_DEVICES) if name in os.environ}
    if len({tuple(_parse_list(name)) for name in given}) > 1:
        both = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{both} name different cores; unset one of them")
    return next(iter(given), None)


def find_cpus() -> dict[int, set[int]]:
    """Return the CPUs near each logical core's device that this process may use, by the core; nothing where neuron-ls does not say.

    Those of NEURON_RT_LOW_LATENCY_TASKS_CPU_AFFINITY are left to the runtime. Raise ValueError where that is no list.
    """
    usable = os.sched_getaffinity(0)
    usable -= set(_parse_list(_LOW_LATENCY_CPUS)) if os.environ.get(_LOW_LATENCY_CPUS) else set()
    near: dict[int, set[int]] = {}
    for device in _list_devices():
        with suppress(ValueError):
            cpus = usable.intersection(_parse_list("cpu_affinity", str(device.get("cpu_affinity"))))
            near |= dict.fromkeys(device.get("neuroncore_ids") or (), cpus)
    return near


def _take_cores(present: int | None, world_size: int, replicas: int = 1) -> list[int]:
    wanted, variable = world_size * replicas, _visible_variable()
    cores = list(range(wanted if present is None else present)) if variable is None else _parse_list(variable)
    if len(cores) < wanted:
        source = f"{variable}={os.environ[variable]} names" if variable is not None else "this machine has"
        each = "" if replicas == 1 else f" for {replicas} replicas"
        raise RuntimeError(
            f"tensor_parallel_size={world_size} needs {wanted} logical cores{each}, and {source} {len(cores)}; run it on a "
            f"larger instance, or export the model with a smaller tensor_parallel_size"
        )
    return cores[:wanted]


def _check_groups(variable: str, cores: list[int], size: int, per_device: int) -> None:
    """Raise RuntimeError where the cores of a replica are on several devices that are no group of those that the runtime connects.

    longdct/vllm-neuron (deepseek-v4-on-device-sampling.md) has wrong results of 8 ranks on cores 12 to 19 of trn2.
    """
    for start in range(0, len(cores), size):
        group = cores[start : start + size]
        first = group[0] // size * size
        is_aligned = group == list(range(first, first + size))
        if not is_aligned and len({core // per_device for core in group}) > 1:
            raise RuntimeError(
                f"{variable}={os.environ[variable]} gives {size} ranks the cores {', '.join(map(str, group))}, which are on "
                f"several devices and do not begin at a multiple of {size}; name cores like {first}-{first + size - 1}"
            )


def _parse_list(variable: str, text: str | None = None) -> list[int]:
    """Return the numbers of a list like 0-3,6: a variable's, or `text`."""
    text, numbers = os.environ[variable] if text is None else text, list[int]()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f"{variable}={text!r} is no list like 0-3,6; correct or unset it")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _list_devices() -> list[dict[str, Any]]:
    tool = shutil.which("neuron-ls") or shutil.which(_LIST_TOOL)
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, "-j"], capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
        listed = json.loads(answer.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []  # without a device the tool prints an error instead; /dev shows the rest
    if isinstance(listed, dict):  # the form of other versions of the tool
        listed = listed.get("neuron_devices")
    return [entry for entry in listed or () if isinstance(entry, dict)]
