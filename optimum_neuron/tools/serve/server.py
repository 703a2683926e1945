# SPDX-License-Identifier: Apache-2.0
"""The life of a server: it loads an artifact, serves requests, and ends after the last one."""

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
from .loaded_model import LoadedModel
from .metrics import Metrics
from .prompts import PromptEncoder
from .tracing import Tracing


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of `optimum-cli neuron serve`.

    Attributes:
        name: the model's name in requests.
        max_queue: requests that may wait for a slot.
        drain_timeout: seconds from a signal to the end of requests that have no answer.
        step_timeout: seconds that a step of the engine may take.
        otlp_traces_endpoint: address of the collector of spans; None: no spans.
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
    """An application over a loaded model, with its admission and metrics."""

    app: Starlette
    served: LoadedModel
    gate: Gate
    metrics: Metrics


@contextmanager
def load_app(options: ServerOptions) -> Iterator[LoadedApp]:
    """Load the artifact and start its engine, which ends with the context.

    Raises:
        ValueError: the artifact has no tokenizer.
        ImportError: spans are asked for, and OpenTelemetry is not installed.
    """
    endpoint = options.otlp_traces_endpoint
    with ExitStack() as life:
        tracing = None if endpoint is None else life.enter_context(closing(Tracing(endpoint, options.name)))
        start = time.perf_counter()
        model = NeuronModelForCausalLM.from_pretrained(
            options.artifact,
            export=False,
            trust_remote_code=options.trust_remote_code,
            rank_python=options.rank_python,
            rank_timeout=options.rank_timeout,
        )
        # The model's files are verified: this may run code among them.
        tokenizer = load_tokenizer(
            options.artifact, str(options.artifact), trust_remote_code=options.trust_remote_code
        )
        service = life.enter_context(model.serve(step_timeout=options.step_timeout))
        served = LoadedModel.from_model(model, service, tokenizer, options.name, time.perf_counter() - start)
        gate = Gate(served.config.batch_size, options.max_queue, lambda: served.service.stopped)
        metrics = Metrics(served, gate)
        encoder = life.enter_context(closing(PromptEncoder(served.tokenizer, served.config)))
        app = create_app(served, gate, metrics, encoder, api_key=options.api_key, tracing=tracing)
        yield LoadedApp(app, served, gate, metrics)


def serve_artifact(options: ServerOptions, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then until the last request has its answer, or the time for that is over.

    Args:
        listening: socket at the address; connections wait until the model is loaded.

    Raises:
        ValueError: the artifact has no tokenizer.
    """
    with load_app(options) as loaded:
        announce_server(options, loaded.served.config, listening)
        stop = partial(loaded.served.service.close, timeout=LAST_READS)
        DrainingServer(server_config(loaded.app), loaded.gate, options.drain_timeout, stop).run(sockets=[listening])


def announce_server(
    options: ServerOptions, config: NeuronConfig, listening: socket.socket, replicas: str = ""
) -> None:
    """Write a server's address and sizes to stderr."""
    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    sys.stderr.write(
        f"serving {options.name} at http://{where}:{port}/v1: {replicas}{config.batch_size} requests of up to "
        f"{config.sequence_length:,} tokens at once, {options.max_queue} may wait\n"
    )
