# SPDX-License-Identifier: Apache-2.0
"""The server's life: an artifact is loaded, requests are served, and the last one is waited for."""

from __future__ import annotations

import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from ..checkpoints.tokenizer import load_tokenizer
from ..modeling import NeuronModelForCausalLM
from .app import create_app
from .gate import Gate
from .metrics import Metrics
from .prompts import PromptEncoder
from .served_model import ServedModel


# Seconds that clients have to read what was generated for them, once the server ends.
_LAST_READS = 10


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `optimum-cli neuron serve` was told.

    Attributes:
        name: what requests call the model.
        max_queue: requests that may wait for a slot.
    """

    artifact: Path
    name: str
    api_key: str | None
    max_queue: int
    trust_remote_code: bool
    rank_python: str | None
    rank_timeout: float | None


def serve(options: ServerOptions, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then until the last request has its answer.

    Args:
        bound: has the address.

    Raises:
        ValueError: the artifact has no tokenizer.
    """
    start = time.perf_counter()
    model = NeuronModelForCausalLM.from_pretrained(
        options.artifact,
        export=False,
        trust_remote_code=options.trust_remote_code,
        rank_python=options.rank_python,
        rank_timeout=options.rank_timeout,
    )
    # The model's files are verified: this may run code among them.
    tokenizer = load_tokenizer(options.artifact, str(options.artifact), trust_remote_code=options.trust_remote_code)
    with model.serve() as service:
        served = ServedModel.of(model, service, tokenizer, options.name, time.perf_counter() - start)
        _run(served, options, bound)


def _run(served: ServedModel, options: ServerOptions, bound: socket.socket) -> None:
    gate = Gate(served.config.batch_size, options.max_queue, lambda: served.service.is_closed)
    metrics = Metrics(served, gate)
    encoder = PromptEncoder(served.tokenizer, served.config)
    app = create_app(served, gate, metrics, encoder, api_key=options.api_key)
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_READS
    )
    host, port = bound.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sys.stderr.write(
        f"serving {served.name} at http://{where}:{port}/v1: {served.config.batch_size} requests of up to "
        f"{served.config.sequence_length:,} tokens at once, {options.max_queue} may wait\n"
    )
    try:
        DrainingServer(config, gate).run(sockets=[bound])
    finally:
        encoder.close()


class DrainingServer(uvicorn.Server):
    """At a first SIGTERM or SIGINT it answers those whose requests run or wait, and refuses others until it ends; a second
    one ends it at once."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._gate = gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at a signal."""
        if self._gate.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._gate.draining = True
        sys.stderr.write(f"ending: {self._gate.live} requests get their answers first; a second signal ends at once\n")

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        self.should_exit = self._gate.draining and not self._gate.live
        return await super().on_tick(counter)
