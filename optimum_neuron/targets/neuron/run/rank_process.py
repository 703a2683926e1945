# SPDX-License-Identifier: Apache-2.0
"""The process of one rank, from its parent's side: started on its core, asked and answered through a pipe, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from ...processes import TiedProcess
from ..sdk.devices import NUMBER_OF_CORES, VISIBLE_CORES
from ..sdk.flags import LNC_VARIABLE, has_paired_cores
from ..sdk.runtime_errors import NeuronRuntimeError
from .load_plan import LoadPlan


WORKER = "optimum_neuron.targets.neuron.run.rank_worker"
# Seconds that a process has to end by itself, which gives its core back in order.
GRACE = 15.0
_TAIL = 1500


class RankProcess:
    """A child that holds one logical core.

    Attributes:
        pipe: to wait on, together with those of other ranks.
    """

    def __init__(self, plan: LoadPlan, rank: int, core: int, address: str, memory: int) -> None:
        self.rank = rank
        self._world_size = plan.world_size
        parent, child = socket.socketpair()
        self.pipe = Connection(parent.detach())
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
        self.process = TiedProcess(
            [sys.executable, "-m", WORKER, str(rank), str(child.fileno()), str(memory)],
            env=_environment(plan, core, address),
            stdin=subprocess.DEVNULL,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            pass_fds=(child.fileno(), memory),
            grace=GRACE,
        )
        child.close()

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends a command; where the process has died, `receive` tells."""
        with contextlib.suppress(OSError):
            for part in parts:
                self.pipe.send_bytes(part)

    def receive(self, doing: str) -> tuple[NeuronRuntimeError | None, bytes]:
        """What went wrong in the process, if anything did, and the data of its answer.

        Raises:
            NeuronRuntimeError: the process has ended.
        """
        try:
            answer = json.loads(self.pipe.recv_bytes())
            data = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._death(doing) from None
        if "error" not in answer:
            return None, data
        message = f"rank {self.rank} of {self._world_size}: {answer['error']}"
        return NeuronRuntimeError(message, code=answer["code"], recoverable=answer["recoverable"]), data

    def close(self) -> None:
        """Kills what is left of the process, and frees what the parent holds for it."""
        self.process.end()
        self._log.close()

    def _death(self, doing: str) -> NeuronRuntimeError:
        how = "closed its pipe"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(GRACE)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        text = os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", errors="replace").strip()
        tail = f"\n{text[-_TAIL:]}" if text else ""
        return NeuronRuntimeError(
            f"{doing} failed: the process of rank {self.rank} of {self._world_size} {how}; load the model again{tail}"
        )


def end_processes(ranks: Sequence[RankProcess]) -> None:
    """Ends the processes of all ranks together, as one may wait for another; kills those that do not end."""
    for rank in ranks:
        rank.pipe.close()
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.close()


def free_address() -> str:
    """A place on this machine where the ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def _environment(plan: LoadPlan, core: int, address: str) -> dict[str, str]:
    root = Path(__file__).parents[4]
    host, _, port = address.partition(":")
    environment = {name: value for name, value in os.environ.items() if name != NUMBER_OF_CORES} | {
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
        VISIBLE_CORES: str(core),
        # libtorch_neuronx_lite makes the first of the other two, where nobody has.
        "NEURON_RT_ROOT_COMM_ID": address,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    if has_paired_cores(plan.target):
        environment[LNC_VARIABLE] = str(plan.lnc)
    return environment
