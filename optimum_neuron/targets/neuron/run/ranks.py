# SPDX-License-Identifier: Apache-2.0
"""Graphs in processes of their own, one per rank or one for all; each rank holds one logical core, and all run the same step.

Inputs, rank 0's outputs and the starts and ends of steps pass through memory that all processes map; other commands, their answers and errors
through a socket per process.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from ....step.spec import LOGITS
from ... import IN_ENVIRONMENT, RankOptions
from ..graphs.io import PROBE, PROBED, GraphIO
from ..rank.plan import HALVES, RankPlan
from ..rank.steps import FAILED, PLACES, WAITED, ParentSteps
from ..sdk.devices import NUMBER_OF_CORES, VISIBLE_CORES, VISIBLE_DEVICES, check_devices, find_cpus
from ..sdk.errors import NeuronRuntimeError
from ..sdk.flags import EXEC_TIMEOUT_VARIABLE, runtime_environment, step_timeout
from ..sdk.hardware import LNC_VARIABLE, has_paired_cores
from ..sdk.stacks import NXD, choose_runtime
from .executors import AheadExecutable, returned_names
from .load_plan import LoadPlan, SharedTensors, find_weights, join_states, split_state
from .rank_process import CAPTURE_GRACE, GRACE, Interpreter, RankProcess, end_processes, find_interpreter


_LOAD_TIMEOUT = 3600.0  # seconds; every rank reads its weights from disk
# Seconds beyond the runtime's timeout in which a rank that is alive reports it.
_SLACK = 15.0


class StartedStep:
    """A step that the ranks run; a call waits for its end and returns its outputs; see `Executable.start`.

    `outputs` are None until the ranks have answered, and where they failed.
    """

    def __init__(self, executable: RankedExecutable, doing: str, shared: Sequence[np.ndarray | None]) -> None:
        self._executable, self.doing, self.shared = executable, doing, shared
        self.outputs: list[np.ndarray | None] | None = None
        self.error: NeuronRuntimeError | None = None

    def __call__(self) -> Sequence[np.ndarray | None]:
        while self.outputs is None:
            if self.error is not None:
                raise self.error
            self._executable.settle_first()
        return self.outputs


class RankedExecutable(AheadExecutable):
    """Loaded graphs of all ranks in processes of their own; `read_state` joins what all ranks hold.

    Ranks run steps in the order of `start`. The next one is on its way while one runs, so no rank waits for this process between them.
    `close` ends the processes and frees the cores, also when the object or this process ends.
    """

    def __init__(self, plan: LoadPlan, options: RankOptions = IN_ENVIRONMENT) -> None:
        """Start the processes on this machine's devices, and wait until all have loaded; where one could not, none is left.

        Raises:
            RuntimeError: the devices, interpreter or packages do not fit, or a device failed (NeuronRuntimeError).
            FileNotFoundError: a compiled graph is missing.
            ValueError: the weights are not those of the graphs, or an option has no such value.
        """
        cores = check_devices(plan.target, plan.lnc, plan.world_size)
        interpreter, found = find_interpreter(options.python)
        runtime = choose_runtime(plan.target, found, interpreter.path)
        super().__init__(plan.graphs, plan.calls)
        self._limit = step_timeout(options.timeout)
        self._patience = self._limit + _SLACK
        self._tensors = SharedTensors(plan)
        self._ended: NeuronRuntimeError | None = None
        self._returned = {name: returned_names(io) for name, io in plan.graphs.items()}
        self._ranks: list[RankProcess] = []
        self._underway: deque[StartedStep] = deque()
        self._number = 0  # of the next step
        self._world_size = plan.world_size
        self._steps = ParentSteps(self._tensors.board)
        self.close = weakref.finalize(self, end_processes, self._ranks, self._steps.events)
        try:
            self._start_processes(plan, runtime, interpreter, cores, options)
            commands = [{"load": asdict(rank.plan)} for rank in self._ranks]
            self._ask_ranks("loading the model", commands, _LOAD_TIMEOUT)
            if PROBE in plan.graphs:
                self._check_collectives(plan.graphs[PROBE])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(self._tensors.file)
        self._states = self._ranks[0].plan.states()

    def _start_processes(
        self, plan: LoadPlan, runtime: str, interpreter: Interpreter, cores: Sequence[int], options: RankOptions
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = str(probe.getsockname()[1])
        others = (NUMBER_OF_CORES, VISIBLE_DEVICES)  # a rank's own cores take the place of both
        inherited = {name: value for name, value in interpreter.environment().items() if name not in others}
        environment = runtime_environment(inherited, self._limit, options.capture) | {
            "NEURON_RT_ROOT_COMM_ID": f"localhost:{port}",  # where the ranks meet
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        if has_paired_cores(plan.target):
            environment[LNC_VARIABLE] = str(plan.lnc)
        grace = GRACE if options.capture is None else CAPTURE_GRACE
        everyone, near = tuple(range(plan.world_size)), find_cpus()
        weights = [find_weights(plan, rank) for rank in everyone]
        # NxDModel holds all ranks in one process; the others join theirs through the device's own collectives.
        for ranks in [everyone] if runtime == NXD else [(rank,) for rank in everyone]:
            files = tuple(weights[rank] for rank in ranks)
            cpus = sorted({cpu for rank in ranks for cpu in near.get(cores[rank], ())})
            load = RankPlan(runtime, ranks, plan.world_size, self._tensors.size, cpus, files, self._tensors.graphs)
            own = {VISIBLE_CORES: ",".join(str(cores[rank]) for rank in ranks)}
            shared = [self._tensors.file, *self._steps.events]
            self._ranks.append(RankProcess(interpreter, load, environment | own, shared, grace))
            self._steps.poll.register(self._ranks[-1].pipe, 0)  # its end alone

    def _check_collectives(self, io: GraphIO) -> None:
        """Run every collective of the graphs on known numbers; raise NeuronRuntimeError where one returns others on a rank that answers."""
        (given,) = self._tensors.inputs[0][PROBE]
        assert given is not None
        for scale in (1.0, -2.0):  # what the first run left is no result of the second
            given[:] = scale
            commands = [{"probe": PROBE}] * len(self._ranks)
            answers = self._ask_ranks("testing the collectives", commands, self._patience, size=4 * len(io.outputs))
            for rank, answer in zip(self._ranks, answers, strict=True):
                for output, count in zip(io.outputs, np.frombuffer(answer, np.float32), strict=True):
                    if count:
                        raise NeuronRuntimeError(
                            f"the devices gave {rank.name} {count:.0f} wrong numbers from an {output.name.removeprefix(PROBED)}; "
                            f"update aws-neuronx-runtime-lib and aws-neuronx-collectives, or export the model with a "
                            f"tensor_parallel_size whose ranks are on one device"
                        )

    def start(self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool) -> StartedStep:
        """Start a step; raise NeuronRuntimeError of an earlier step, and again in all later calls where ranks cannot continue."""
        while len(self._underway) >= HALVES:
            self.settle_first()
        self._check_open()
        half = self._number % HALVES
        due = self.find_due(graph, inputs)
        for name, given in ((graph, inputs), *((draw.graph, taken) for draw, taken in due)):
            for shared, array in zip(self._tensors.inputs[half][name], given, strict=True):
                if shared is not None:
                    np.copyto(shared, array)
        drawn = {draw.tokens for draw, _ in due}  # a sampler's tokens lie where the step's would
        read = [
            number
            for number, name in enumerate(self._returned[graph])
            if (logits or not name.endswith(LOGITS)) and number not in drawn
        ]
        runs = [(graph, read), *((draw.graph, [0]) for draw, _ in due)]
        wanted = {*read, *drawn}
        outputs = [
            each if number in wanted else None for number, each in enumerate(self._tensors.outputs[half][graph])
        ]
        step = StartedStep(self, f"graph {' and '.join(name for name, _ in runs)}", outputs)
        with self._ending_on_failure(step.doing):
            self._steps.start(self._number, {"run": runs, "half": half}, len(self._ranks))
        self._underway.append(step)
        self._number += 1
        return step

    def settle_first(self) -> None:
        """Wait until the ranks have answered the first step under way; raise the error after which they cannot continue."""
        self._check_open()
        number, step = self._number - len(self._underway), self._underway.popleft()
        with self._ending_on_failure(step.doing):
            step.error = self._end_step(step.doing, number)
        if step.error is None:  # copies, as the next step but one overwrites them
            step.outputs = [None if each is None else each.copy() for each in step.shared]

    def _end_step(self, doing: str, number: int) -> NeuronRuntimeError | None:
        """Wait until all processes have run a step; return a recoverable error, and raise NeuronRuntimeError for any other."""
        ended, ready = self._steps.wait(self._patience)
        ends = list(zip(self._ranks, self._steps.ends[number % PLACES], strict=False))
        error: NeuronRuntimeError | None = None
        for rank in [rank for rank, end in ends if end == FAILED or (not ended and rank.pipe.fileno() in ready)]:
            failure, _ = rank.receive(doing, self._patience, 0)
            error = error or failure
        if not ended:
            silent = [rank for rank, end in ends if end == WAITED]
            raise error or self._explain_silence(doing, self._patience, silent)
        if error is not None and not error.recoverable:
            raise error
        return error

    def read_state(self, name: str) -> np.ndarray:
        state = self._states[name]
        commands = [{"read": name}] * len(self._ranks)
        answers = self._ask_ranks(f"reading {name}", commands, self._patience, size=state.nbytes)
        parts = np.concatenate([np.frombuffer(data, state.dtype) for data in answers])
        return join_states(list(parts.reshape(self._world_size, *state.shape)))

    def write_state(self, name: str, array: np.ndarray) -> None:
        state = self._states[name]
        parts = split_state(array.astype(state.dtype), self._world_size)
        if parts[0].shape != state.shape:
            raise ValueError(f"state {name} has shape {list(state.shape)} on a rank, not {list(parts[0].shape)}")
        data = [b"".join(parts[rank].tobytes() for rank in process.plan.ranks) for process in self._ranks]
        self._ask_ranks(f"writing {name}", [{"write": name}] * len(data), self._patience, data)

    def _ask_ranks(
        self,
        doing: str,
        commands: Sequence[dict[str, Any]],
        timeout: float,
        data: Sequence[bytes] | None = None,
        size: int = 0,
    ) -> list[bytearray]:
        """Send each process a command, with its data; return the data of their answers, `size` bytes per rank at most."""
        while self._underway:
            self.settle_first()
        self._check_open()
        with self._ending_on_failure(doing):
            for rank, command, each in zip(self._ranks, commands, data or [b""] * len(commands), strict=True):
                rank.send(command, each, timeout)
            answers, error = self._collect_answers(doing, timeout, size)
        if error is not None:
            raise error
        return [answers[rank] for rank in self._ranks]

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if not self.close.alive:
            raise RuntimeError("the model was closed; load it again")

    def _collect_answers(
        self, doing: str, timeout: float, size: int
    ) -> tuple[dict[RankProcess, bytearray], NeuronRuntimeError | None]:
        """Return every process's answer, and a recoverable error; raise NeuronRuntimeError for any other."""
        answers: dict[RankProcess, bytearray] = {}
        error: NeuronRuntimeError | None = None
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._ranks):
            waiting: dict[Any, RankProcess] = {rank.pipe: rank for rank in self._ranks if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise error or self._explain_silence(doing, timeout, list(waiting.values()))
            for rank in (waiting[pipe] for pipe in waiting if pipe in ready):
                try:
                    left = max(0.0, deadline - time.monotonic())
                    failure, answers[rank] = rank.receive(doing, left, size * len(rank.plan.ranks))
                except TimeoutError:
                    raise error or self._explain_silence(doing, timeout, [rank]) from None
                if failure is not None and error is None:
                    # The others wait for this rank in a collective, until the runtime ends that.
                    error, deadline = failure, time.monotonic() + self._patience
        if error is not None and not error.recoverable:
            raise error
        return answers, error

    def _explain_silence(self, doing: str, timeout: float, silent: Sequence[RankProcess]) -> NeuronRuntimeError:
        who = ", ".join(rank.name for rank in silent)
        message = f"{doing} failed: {who} did not answer within {timeout:g} s"
        if timeout == self._patience:
            message += (
                f", which is {EXEC_TIMEOUT_VARIABLE}={self._limit:g} and {_SLACK:g} more; if a step may take longer, as "
                f"the first one does while ranks join, raise it or rank_timeout"
            )
        return NeuronRuntimeError(f"{message}; load the model again")

    @contextmanager
    def _ending_on_failure(self, doing: str) -> Iterator[None]:
        """End all ranks where one failed for good, and where an answer was not awaited: it would answer the next step."""
        try:
            yield
        except BaseException as error:
            failed = isinstance(error, NeuronRuntimeError)
            message = str(error) if failed else f"{doing} was interrupted; load the model again"
            self._ended = NeuronRuntimeError(message, code=getattr(error, "code", None))
            self.close()
            raise
