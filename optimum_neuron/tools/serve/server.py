# SPDX-License-Identifier: Apache-2.0
"""The server's life: an artifact is loaded, requests are served, and the last one is waited for."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...checkpoints.tokenizer import load_tokenizer
from ...generate import NeuronModelForCausalLM
from .app import create_app
from .draining import LAST_READS, DrainingServer, server_config
from .gate import Gate
from .metrics import Metrics
from .prompts import PromptEncoder
from .served_model import ServedModel
from .tracing import Tracing


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What `optimum-cli neuron serve` was told.

    Attributes:
        name: what requests call the model.
        max_queue: requests that may wait for a slot.
        drain_timeout: seconds from a signal to the end of requests that have no answer.
        step_timeout: seconds that a step of the engine may take.
        otlp_traces_endpoint: of the collector that gets spans; None: there is none.
    """

    artifact: Path
    name: str
    api_key: str | None
    max_queue: int
    drain_timeout: float
    step_timeout: float
    trust_remote_code: bool
    rank_python: str | None
    rank_timeout: float | None
    otlp_traces_endpoint: str | None


def serve(options: ServerOptions, listening: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT, then until the last request has its answer, or the time for that is over.

    Args:
        listening: at the address; who connects before the model is loaded waits.

    Raises:
        ValueError: the artifact has no tokenizer.
        ImportError: spans are asked for, and OpenTelemetry is not installed.
    """
    endpoint = options.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing(endpoint, options.name)
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
    with model.serve(step_timeout=options.step_timeout) as service:
        served = ServedModel.of(model, service, tokenizer, options.name, time.perf_counter() - start)
        _run(served, options, listening, tracing)


def _run(served: ServedModel, options: ServerOptions, listening: socket.socket, tracing: Tracing | None) -> None:
    gate = Gate(served.config.batch_size, options.max_queue, lambda: served.service.stopped)
    metrics = Metrics(served, gate)
    encoder = PromptEncoder(served.tokenizer, served.config)
    app = create_app(served, gate, metrics, encoder, api_key=options.api_key, tracing=tracing)
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sys.stderr.write(
        f"serving {served.name} at http://{where}:{port}/v1: {served.config.batch_size} requests of up to "
        f"{served.config.sequence_length:,} tokens at once, {options.max_queue} may wait\n"
    )
    try:
        stop = partial(served.service.close, timeout=LAST_READS)
        DrainingServer(server_config(app), gate, options.drain_timeout, stop).run(sockets=[listening])
    finally:
        encoder.close()
        if tracing is not None:
            tracing.close()
