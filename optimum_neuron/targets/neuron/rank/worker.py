# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, or of all: `probe` describes this interpreter, `serve SOCKET MEMORY` answers commands.

SOCKET and MEMORY are descriptors. The first command holds the plan to load; the process ends when the socket does.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .packages import RUNTIME_PACKAGES, installed_version, package_problem
from .wire import Channel, RankError, doing


def main(arguments: Sequence[str]) -> None:
    """Run `probe`, or `serve SOCKET MEMORY`."""
    if arguments[0] == "probe":
        sys.stdout.write(json.dumps(_describe_interpreter()) + "\n")
        return
    channel, memory = Channel(socket.socket(fileno=int(arguments[1]))), int(arguments[2])
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
                graphs = load_plan(command["load"], memory)
            elif "run" in command:
                for graph, read in command["run"]:
                    with doing(f"graph {graph}"):
                        graphs.run_step(graph, command["half"], read)
            elif "read" in command:
                with doing(f"reading {command['read']}"):
                    result = graphs.read_state(command["read"])
            else:
                with doing(f"writing {command['write']}"):
                    graphs.write_state(command["write"], data)
        except RankError as error:
            answer = {"error": str(error), "doing": error.doing, "missing": error.missing}
        channel.send(answer, result)


def _describe_interpreter() -> dict[str, Any]:
    """Describe the packages to run graphs with; no runtime is imported, as that starts it."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "numpy": None, "numpy_problem": None}
    try:
        import numpy

        found["numpy"] = numpy.__version__
    except Exception as error:  # one built for another Python raises what it likes
        found["numpy_problem"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    found["torch"] = installed_version("torch")
    found["packages"] = {each.distribution: package_problem(each) for each in RUNTIME_PACKAGES}
    return found


def load_plan(data: dict[str, Any], memory: int) -> Any:
    """Return the graphs of a plan, loaded; `memory` is the descriptor of what all processes map."""
    import numpy as np

    from .plan import HALVES, RankPlan

    with doing("reading what to load"):
        plan = RankPlan.from_dict(data)
        shared = np.frombuffer(mmap.mmap(memory, HALVES * plan.memory), dtype=np.uint8).reshape(HALVES, plan.memory)
    if plan.runtime == "nrtpy":
        from .core import CoreGraphs

        return CoreGraphs(plan, shared)
    from .nxd_runtime import NxDGraphs

    return NxDGraphs(plan, shared)
