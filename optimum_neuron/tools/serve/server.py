# SPDX-License-Identifier: Apache-2.0
"""The server's life: an artifact is loaded, requests are served, and the last one is waited for."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette

from ...checkpoints.tokenizer import load_tokenizer
from ...config import NeuronConfig
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


class LoadedApp(NamedTuple):
    """An application over a loaded model, and what ends and measures it."""

    app: Starlette
    served: ServedModel
    gate: Gate
    metrics: Metrics


@contextmanager
def load_app(options: ServerOptions) -> Iterator[LoadedApp]:
    """Load the artifact and start its engine; the context's end ends it.

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
    with model.serve(step_timeout=options.step_timeout) as service, ExitStack() as last:
        served = ServedModel.of(model, service, tokenizer, options.name, time.perf_counter() - start)
        gate = Gate(served.config.batch_size, options.max_queue, lambda: served.service.stopped)
        metrics = Metrics(served, gate)
        if tracing is not None:
            last.callback(tracing.close)
        encoder = last.enter_context(closing(PromptEncoder(served.tokenizer, served.config)))
        app = create_app(served, gate, metrics, encoder, api_key=options.api_key, tracing=tracing)
        yield LoadedApp(app, served, gate, metrics)


def serve(options: ServerOptions, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then until the last request has its answer, or the time for that is over.

    Args:
        listening: at the address; who connects before the model is loaded waits.

    Raises:
        ValueError, ImportError: as `load_app`.
    """
    with load_app(options) as loaded:
        announce(options, loaded.served.config, listening)
        stop = partial(loaded.served.service.close, timeout=LAST_READS)
        DrainingServer(server_config(loaded.app), loaded.gate, options.drain_timeout, stop).run(sockets=[listening])


def announce(options: ServerOptions, config: NeuronConfig, listening: socket.socket, replicas: str = "") -> None:
    """Say on stderr where a server answers, and for how many."""
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sys.stderr.write(
        f"serving {options.name} at http://{where}:{port}/v1: {replicas}{config.batch_size} requests of up to "
        f"{config.sequence_length:,} tokens at once, {options.max_queue} may wait\n"
    )
