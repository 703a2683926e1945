# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one which has imported the package: each starts in a moment, and ends as any program."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import optimum_neuron


# The waiter between the two reports the program's id and exit code, since only a parent learns the code.
_FORKS = """
import json, os, signal, socket, sys
import torch, transformers
from optimum_neuron import NeuronModelForCausalLM, Request
from optimum_neuron.tools.serve import app, server
from transformers import AutoModelForCausalLM, AutoTokenizer

requests = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    message, files, _, _ = socket.recv_fds(requests, 2**20, 3)
    if not message:
        os._exit(0)
    if os.fork():
        for file in files:
            os.close(file)
        continue
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, state = files
    if child := os.fork():
        os.close(output), os.close(errors)
        os.write(state, b"%d " % child)
        os.write(state, b"%d " % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(state), os.dup2(output, 1), os.dup2(errors, 2), os.close(output), os.close(errors)
    sys.stdout, sys.stderr = (open(file, "w", buffering=1, closefd=False) for file in (1, 2))
    script, arguments, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    break
exec(compile(script, "<script>", "exec"))
"""


@cache
def _start_forks() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"PYTHONPATH": str(Path(optimum_neuron.__file__).parents[1])}
    command = [sys.executable, "-c", _FORKS, str(theirs.fileno())]
    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()
    return ours


class WarmProcess:
    """A running program, with the methods of subprocess.Popen that tests use.

    `variables` change its environment, but for what libraries read when they are imported.
    """

    def __init__(self, script: str, *arguments: str | Path, **variables: str) -> None:
        message = json.dumps([script, list(map(str, arguments)), dict(os.environ | variables)])
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(_start_forks(), [message.encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr, self._state = (os.fdopen(read) for read, _ in pipes)
        self.returncode: int | None = None
        self.pid = int(self._read_number())

    def _read_number(self) -> str:
        read = b""
        while not read.endswith(b" "):
            read += os.read(self._state.fileno(), 1) or b"0 "
        return read.decode()

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._state], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            self.returncode = int(self._read_number())
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what the program writes until its end."""
        with ThreadPoolExecutor(2) as threads:
            reads = [threads.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return reads[0].result(), reads[1].result()
