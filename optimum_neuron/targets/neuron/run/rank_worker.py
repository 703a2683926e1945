# SPDX-License-Identifier: Apache-2.0
"""The process of one rank: `python -m optimum_neuron.targets.neuron.run.rank_worker RANK PIPE MEMORY`.

PIPE and MEMORY are descriptors. The first command holds the plan to load; the process ends when the pipe does.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..sdk.runtime_errors import NeuronRuntimeError, runtime_error
from .device_executable import DeviceExecutable
from .load_plan import LoadPlan
from .runtimes import open_device
from .shared_tensors import SharedTensors


class _Worker:
    def __init__(self, rank: int, pipe: Connection, memory: int) -> None:
        self._rank, self._pipe, self._memory = rank, pipe, memory

    def load(self, command: dict[str, Any]) -> bytes:
        plan = LoadPlan.from_dict(command["plan"])
        self._tensors = SharedTensors(plan, self._memory)
        device = open_device(command["runtime"], self._rank, plan.world_size)
        self._executable = DeviceExecutable(device, plan, self._rank)
        return b""

    def run(self, graph: str) -> bytes:
        inputs = [torch.empty(0) if each is None else each for each in self._tensors.inputs[graph]]
        outputs = self._executable.run(graph, inputs)
        if self._rank == 0:
            for shared, output in zip(self._tensors.outputs[graph], outputs, strict=True):
                shared.copy_(output)
        return b""

    def read(self, name: str) -> bytes:
        return self._executable.read_state(name).contiguous().view(torch.uint8).numpy().tobytes()

    def write(self, name: str, data: bytes) -> bytes:
        state = self._executable.read_state(name)
        self._executable.write_state(name, torch.frombuffer(bytearray(data), dtype=state.dtype).view(state.shape))
        return b""

    def answer(self, command: dict[str, Any]) -> bytes:
        if "run" in command:
            return self.run(command["run"])
        if "read" in command:
            return self.read(command["read"])
        if "write" in command:
            return self.write(command["write"], self._pipe.recv_bytes())
        return self.load(command)


def main(rank: int, pipe: Connection, memory: int) -> None:
    """Answers commands until the pipe closes."""
    worker = _Worker(rank, pipe, memory)
    while True:
        try:
            command = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer: dict[str, Any] = {}
        data = b""
        try:
            data = worker.answer(command)
        except Exception as error:
            failure = error if isinstance(error, NeuronRuntimeError) else runtime_error(error, "the step")
            answer = {"error": str(failure), "code": failure.code, "recoverable": failure.recoverable}
        pipe.send_bytes(json.dumps(answer).encode())
        pipe.send_bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), Connection(int(sys.argv[2])), int(sys.argv[3]))
