# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, or of all: `probe` describes this interpreter, `serve SOCKET MEMORY EVENTS` answers commands.

These are descriptors, and steps come through MEMORY. The first command holds the plan to load; the process ends when the socket does.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from .packages import RUNTIME_PACKAGES, installed_version, package_problem
from .wire import Channel, RankError, doing


def main(arguments: Sequence[str]) -> None:
    """Run `probe`, or `serve SOCKET MEMORY EVENTS`."""
    if arguments[0] == "probe":
        sys.stdout.write(json.dumps(_describe_interpreter()) + "\n")
        return
    channel, memory = Channel(socket.socket(fileno=int(arguments[1]))), int(arguments[2])
    graphs: Any = None
    steps: Any = None
    while True:
        step = steps and steps.wait_for_step()
        try:
            command, data = (step, b"") if step else channel.receive()
        except EOFError:
            return
        answer: dict[str, Any] = {}
        result = b""
        try:
            if "load" in command:
                graphs, steps = load_plan(command["load"], memory, arguments[3], channel.fileno())
            elif "run" in command:
                for graph, read in command["run"]:
                    with doing(f"graph {graph}"):
                        graphs.run_step(graph, command["half"], read)
            elif "probe" in command:
                with doing(f"graph {command['probe']}"):
                    result = graphs.run_probe(command["probe"])
            elif "read" in command:
                with doing(f"reading {command['read']}"):
                    result = graphs.read_state(command["read"])
            else:
                with doing(f"writing {command['write']}"):
                    graphs.write_state(command["write"], data)
        except RankError as error:
            answer = {"error": str(error), "doing": error.doing, "missing": error.missing}
        if answer or not step:
            channel.send(answer, result)
        if step:
            steps.end_step(bool(answer))


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


def load_plan(data: dict[str, Any], memory: int, events: str, channel: int) -> tuple[Any, Any]:
    """Return the graphs of a plan, loaded, and the steps that they run; `memory` is the descriptor of what all processes map."""
    import numpy as np

    from .plan import HALVES, RankPlan
    from .steps import RankSteps, board_bytes

    with doing("reading what to load"):
        plan = RankPlan.from_dict(data)
        if plan.cpus:  # before a runtime starts threads, which inherit it
            os.sched_setaffinity(0, plan.cpus)
        size = HALVES * plan.memory
        whole = memoryview(mmap.mmap(memory, size + board_bytes(plan.world_size)))
        shared = np.frombuffer(whole[:size], dtype=np.uint8).reshape(HALVES, plan.memory)
        steps = RankSteps(whole[size:], list(map(int, events.split(","))), plan.ranks[0], channel)
    if plan.runtime == "nrtpy":
        from .core import CoreGraphs

        return CoreGraphs(plan, shared), steps
    from .nxd_runtime import NxDGraphs

    return NxDGraphs(plan, shared), steps
