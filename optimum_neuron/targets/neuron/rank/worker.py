# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, or of all: `probe` tells what this interpreter has, `serve SOCKET MEMORY` answers commands.

SOCKET and MEMORY are descriptors. The first command holds the plan to load; the process ends when the socket does.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .failures import RankError, doing
from .packages import RUNTIME_PACKAGES, installed_version, package_problem
from .wire import Channel


def main(arguments: Sequence[str]) -> None:
    """`probe`, or `serve SOCKET MEMORY`."""
    if arguments[0] == "probe":
        sys.stdout.write(json.dumps(_describe()) + "\n")
        return
    _serve(Channel(socket.socket(fileno=int(arguments[1]))), int(arguments[2]))


def _describe() -> dict[str, Any]:
    """What there is to run graphs with; no runtime is imported, as that starts it."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "numpy": None, "numpy_problem": None}
    try:
        import numpy

        found["numpy"] = numpy.__version__
    except Exception as error:  # one built for another Python raises what it likes
        found["numpy_problem"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    found["torch"] = installed_version("torch")
    found["packages"] = {each.distribution: package_problem(each) for each in RUNTIME_PACKAGES}
    return found


def _serve(channel: Channel, memory: int) -> None:
    graphs: Any = None
    while True:
        try:
            command, data = channel.receive()
        except EOFError:
            return
        answer: dict[str, Any] = {}
        result = b""
        try:
            if "load" in command:
                graphs = _load(command["load"], memory)
            elif "run" in command:
                for graph, read in command["run"]:
                    graphs.run(graph, command["half"], read)
            elif "read" in command:
                result = graphs.read(command["read"])
            else:
                graphs.write(command["write"], data)
        except RankError as error:
            answer = {"error": str(error), "doing": error.doing, "missing": error.missing}
        channel.send(answer, result)


def _load(data: object, memory: int) -> Any:
    import numpy as np

    from .core import CoreGraphs, Device
    from .plan import HALVES, RankPlan

    with doing("reading what to load"):
        plan = RankPlan.from_dict(data)
    shared = np.frombuffer(mmap.mmap(memory, HALVES * plan.memory), dtype=np.uint8).reshape(HALVES, plan.memory)
    device: Device
    if plan.runtime == "nrtpy":
        from .nrt_runtime import NrtDevice

        device = NrtDevice(plan.ranks[0], plan.world_size)
    elif plan.runtime == "libtorch-neuronx-lite":
        from .lite_runtime import LiteDevice

        device = LiteDevice(plan.ranks[0], plan.world_size)
    else:
        from .nxd_runtime import NxDGraphs

        return NxDGraphs(plan, shared)
    return CoreGraphs(device, plan, shared)
