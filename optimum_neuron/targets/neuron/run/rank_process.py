# SPDX-License-Identifier: Apache-2.0
"""The process of one rank, or of all, from its parent's side: started on its cores, asked through a socket, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ....kernels.host.processes import TiedProcess
from ..rank.plan import RankPlan
from ..rank.wire import Channel, WireError
from ..sdk.devices import NUMBER_OF_CORES, VISIBLE_CORES
from ..sdk.flags import LNC_VARIABLE, capture_environment, has_paired_cores, runtime_environment
from ..sdk.runtime_errors import NeuronRuntimeError, missing_library, runtime_error
from .interpreter import Interpreter


# Seconds that a process has to end by itself, which gives its core back in order.
GRACE = 15.0
# The same where its runtime captures a profile, part of which it writes as it ends.
CAPTURE_GRACE = 300.0
_TAIL = 1500


class RankProcess:
    """A child process that holds one logical core for each of its ranks."""

    def __init__(
        self,
        interpreter: Interpreter,
        plan: RankPlan,
        environment: Mapping[str, str],
        memory: int,
        *,
        captures: bool = False,
    ) -> None:
        self.plan = plan
        self.captures = captures
        ranks = ", ".join(map(str, plan.ranks))
        self.name = f"rank {ranks} of {plan.world_size}" if len(plan.ranks) == 1 else f"all {plan.world_size} ranks"
        parent, child = socket.socketpair()
        self.pipe = Channel(parent)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
        self.process = TiedProcess(
            interpreter.command("serve", str(child.fileno()), str(memory)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=(child.fileno(), memory),
            grace=self.grace,
        )
        child.close()

    @property
    def grace(self) -> float:
        """Return the seconds that it has to end by itself."""
        return CAPTURE_GRACE if self.captures else GRACE

    def send(self, command: dict[str, Any], data: bytes, timeout: float) -> None:
        """Send a command; where the process has died or does not listen, `receive` raises."""
        with contextlib.suppress(OSError):
            self.pipe.send(command, data, timeout)

    def receive(self, doing: str, timeout: float, most: int) -> tuple[NeuronRuntimeError | None, bytearray]:
        """Return what went wrong in the process, or None, and the data of its answer.

        Args:
            timeout: seconds until the answer is whole.
            most: bytes of data that it may have.

        Raises:
            NeuronRuntimeError: the process has ended, or answered with something else.
            TimeoutError: it has not answered.
        """
        try:
            answer, data = self.pipe.receive(timeout, most)
            if not answer:
                return None, data
            text, step, missing = str(answer["error"]), str(answer["doing"]), bool(answer["missing"])
        except EOFError:
            raise self._explain_death(doing) from None
        except (WireError, KeyError) as error:
            raise NeuronRuntimeError(
                f"{doing} failed: the process of {self.name} answered what no rank says ({error}); load the model again, "
                f"without what writes to the descriptors of other code there{self._read_tail()}"
            ) from None
        failure = missing_library(text, step) if missing else runtime_error(text, step)
        prefix = f"{self.name}: " if self.plan.world_size > 1 else ""
        return NeuronRuntimeError(prefix + str(failure), code=failure.code, recoverable=failure.recoverable), data

    def end(self) -> None:
        """Kill what is left of the process, and free what the parent holds for it."""
        self.process.end()
        self._log.close()

    def _explain_death(self, doing: str) -> NeuronRuntimeError:
        how = "closed its end"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(self.grace)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return NeuronRuntimeError(
            f"{doing} failed: the process of {self.name} {how}; load the model again{self._read_tail()}"
        )

    def _read_tail(self) -> str:
        """Return the end of what the process printed."""
        text = os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", errors="replace").strip()
        return f"\n{text[-_TAIL:]}" if text else ""


def end_processes(ranks: Sequence[RankProcess]) -> None:
    """End all processes together, as one may wait for another; kill those that do not end."""
    for rank in ranks:
        rank.pipe.close()
    deadline = time.monotonic() + max((rank.grace for rank in ranks), default=0.0)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.end()


def free_address() -> str:
    """Return a place on this machine where the ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def rank_environment(
    interpreter: Interpreter,
    target: str,
    lnc: int,
    cores: Sequence[int],
    address: str,
    timeout: float,
    capture: Path | None = None,
) -> dict[str, str]:
    """Return the variables of a process that takes these logical cores; the user's own for the runtime stay.

    Args:
        timeout: seconds that a step may take.
        capture: folder for the runtime's profile.
    """
    host, _, port = address.partition(":")
    inherited = {name: value for name, value in interpreter.environment().items() if name != NUMBER_OF_CORES}
    environment = (
        runtime_environment(inherited, timeout)
        | capture_environment(inherited, capture)
        | {
            VISIBLE_CORES: ",".join(map(str, cores)),
            # libtorch_neuronx_lite makes the first of the other two, where there is none.
            "NEURON_RT_ROOT_COMM_ID": address,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
    )
    if has_paired_cores(target):
        environment[LNC_VARIABLE] = str(lnc)
    return environment
