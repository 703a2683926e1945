# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with a process per rank: each holds one logical core, and all run the same step at once.

Inputs and rank 0's outputs pass through memory that all processes map; commands and answers through a pipe per rank.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from ..graph_io import COPY_SLOT
from ..sdk.runtime_errors import NeuronRuntimeError
from .load_plan import LoadPlan, slot_copy_inputs
from .rank_process import RankProcess, end_processes, free_address
from .shared_tensors import SharedTensors
from .state_parts import join_states, split_state


EXEC_TIMEOUT_VARIABLE = "NEURON_RT_EXEC_TIMEOUT"
_EXEC_TIMEOUT = 30.0  # seconds; the runtime's own default
_LOAD_TIMEOUT = 3600.0  # seconds; every rank reads its weights from disk
# Seconds beyond the runtime's timeout in which a rank that is alive reports it.
_SLACK = 15.0


class RankedExecutable:
    """Loaded graphs of all ranks, each in a process of its own; see `Executable`.

    A state as `read_state` gives it is what all ranks hold, joined along the heads.

    Attributes:
        close: ends the processes and frees the cores; happens by itself when the object or this process ends.
    """

    def __init__(self, plan: LoadPlan, runtime: str, cores: Sequence[int]) -> None:
        """Starts the processes and waits until all have loaded.

        Raises:
            NeuronRuntimeError: one of them could not; none is left.
        """
        self._plan = plan
        self._tensors = SharedTensors(plan)
        self._ended: NeuronRuntimeError | None = None
        address = free_address()
        self._ranks: list[RankProcess] = []
        self.close = weakref.finalize(self, end_processes, self._ranks)
        try:
            for rank, core in enumerate(cores):
                self._ranks.append(RankProcess(plan, rank, core, address, self._tensors.file))
            self._ask("loading the model", {"plan": plan.to_dict(), "runtime": runtime}, _LOAD_TIMEOUT)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(self._tensors.file)

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `Executable.run`.

        Raises:
            NeuronRuntimeError: a rank failed or died; where the others cannot go on, all later calls raise the same.
        """
        for shared, tensor in zip(self._tensors.inputs[graph], inputs, strict=True):
            if shared is not None:
                shared.copy_(tensor)
        self._ask(f"graph {graph}", {"run": graph}, _step_timeout())
        return [shared.clone() for shared in self._tensors.outputs[graph]]

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self.run(COPY_SLOT, slot_copy_inputs(source, destination, length))

    def read_state(self, name: str) -> Tensor:
        binding = self._plan.states()[name]
        dtype = getattr(torch, binding.dtype)
        answers = self._ask(f"reading {name}", {"read": name}, _step_timeout())
        return join_states([torch.frombuffer(bytearray(data), dtype=dtype).view(binding.shape) for data in answers])

    def write_state(self, name: str, tensor: Tensor) -> None:
        dtype = getattr(torch, self._plan.states()[name].dtype)
        parts = split_state(tensor.to(dtype), self._plan.world_size)
        data = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
        self._ask(f"writing {name}", {"write": name}, _step_timeout(), data)

    def _ask(
        self, doing: str, command: dict[str, Any], timeout: float, data: Sequence[bytes] | None = None
    ) -> list[bytes]:
        """Sends one command to all ranks, with data for each if it has any; returns the data of their answers."""
        if self._ended is not None:
            raise self._ended
        if not self.close.alive:
            raise RuntimeError("the model was closed; load it again")
        header = json.dumps(command).encode()
        with self._ending_on_failure(doing):
            for index, rank in enumerate(self._ranks):
                rank.send([header] if data is None else [header, data[index]])
            answers, error = self._collect(doing, timeout)
        if error is not None:
            raise error
        return [answers[rank.rank] for rank in self._ranks]

    def _collect(self, doing: str, timeout: float) -> tuple[dict[int, bytes], NeuronRuntimeError | None]:
        """The answer of every rank, and what one of them reported that it can recover from.

        Raises:
            NeuronRuntimeError: a rank died or is silent, or reported what it cannot recover from.
        """
        answers: dict[int, bytes] = {}
        error: NeuronRuntimeError | None = None
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._ranks):
            waiting = {rank.pipe: rank for rank in self._ranks if rank.rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(str(rank.rank) for rank in waiting.values())
                reason = f"rank {silent} of {len(self._ranks)} did not answer within {timeout:.0f} s"
                raise NeuronRuntimeError(str(error) if error else f"{doing} failed: {reason}; load the model again")
            for rank in (waiting[pipe] for pipe in waiting if pipe in ready):
                failure, answers[rank.rank] = rank.receive(doing)
                if failure is not None and error is None:
                    # The others wait for this rank in a collective, until the runtime ends that.
                    error, deadline = failure, time.monotonic() + _step_timeout()
        if error is not None and not error.recoverable:
            raise error
        return answers, error

    @contextmanager
    def _ending_on_failure(self, doing: str) -> Iterator[None]:
        """Ends all ranks where one failed for good, and where an answer was not waited for: it would answer the next step."""
        try:
            yield
        except BaseException as error:
            failed = isinstance(error, NeuronRuntimeError)
            message = str(error) if failed else f"{doing} was interrupted; load the model again"
            self._ended = NeuronRuntimeError(message, code=getattr(error, "code", None))
            self.close()
            raise


def _step_timeout() -> float:
    return float(os.environ.get(EXEC_TIMEOUT_VARIABLE, _EXEC_TIMEOUT)) + _SLACK
