# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron serve: OpenAI's API for an artifact."""

from __future__ import annotations

import os
from argparse import REMAINDER, ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import add_named_model, add_number, add_rank_options, run_options

from optimum_neuron.cli import add_option, explain, reported_errors


KEY_VARIABLE = "OPTIMUM_NEURON_API_KEY"
DEFAULT_QUEUE = 128
DEFAULT_DRAIN = 100.0
DEFAULT_STEP_TIMEOUT = 300.0
BACKENDS = ("auto", "vllm", "engine")
# What this package's own server imports.
SERVER_MODULES = ("starlette", "uvicorn", "prometheus_client")
# Options of replicas of the engine's server.
SCALE_OPTIONS = ("replicas", "max_replicas", "target_ongoing_requests")

TEXTS = (
    ("--served-model-name", "NAME", "what requests call the model (default: MODEL)"),
    ("--api-key", "KEY",
        f"what clients have to send (default: {KEY_VARIABLE}, which no other user of this machine sees, or nothing)"),
    ("--otlp-traces-endpoint", "URL", "OpenTelemetry collector that gets a span of each request; by "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, grpc or http/protobuf (default: none)"),
)  # fmt: skip
NUMBERS: tuple[tuple[str, type[int] | type[float], str, str], ...] = (
    ("--max-queue", int, "REQUESTS",
        f"with the engine's server, requests that may wait for a slot (default: {DEFAULT_QUEUE})"),
    ("--drain-timeout", float, "SECONDS", "with the engine's server, time from SIGTERM or Ctrl-C to the end of requests that have no "
        f"answer (default: {DEFAULT_DRAIN:g})"),
    ("--step-timeout", float, "SECONDS", "with the engine's server, the longest time of one step: after that its requests fail, and "
        f"/health says so (default: {DEFAULT_STEP_TIMEOUT:g})"),
    ("--replicas", int, "N", "with the engine's server, engines at one address, by Ray Serve, each with its own cores and state "
        "(default: one server without Ray)"),
    ("--max-replicas", int, "N", "with --replicas, most replicas when many requests come; --replicas is then the fewest (default: "
        "--replicas)"),
    ("--target-ongoing-requests", float, "REQUESTS", "with --max-replicas, requests of a replica, running and waiting, above which Ray "
        "starts another one (default: the artifact's batch size)"),
)  # fmt: skip

# Whether an option takes 0, and all that it takes.
LIMITS = {
    "--target-ongoing-requests": (False, "a number above 0"),
    "--max-queue": (True, "at least 0, with which no request waits"),
    "--drain-timeout": (True, "a number of seconds from 0 on"),
    "--step-timeout": (False, "a number of seconds above 0"),
}

DESCRIPTION = """\
Serve an artifact to OpenAI's clients: /v1/chat/completions, /v1/completions and /v1/models, with streaming; /health for
load balancers and /metrics for Prometheus. A checkpoint is exported into the cache on first use.

Where vLLM is installed it serves, with all that it can (tools, structured outputs, penalties); what follows
--vllm-options is its own. Elsewhere, or with --backend engine, the engine of this package does: a small server with the
same routes, in which every running request gets a token in every step. It needs
pip install 'optimum-neuron-runtime[serve]'.

The engine's server refuses what it cannot do, and says why. Requests that find no slot wait, up to --max-queue of
them; others are refused with a time to try again (429). A client that disconnects frees its slot. After SIGTERM or Ctrl-C
running requests finish within --drain-timeout, and new ones are refused (503); a second signal ends at once.

--replicas starts several engines at one address, by Ray Serve (pip install 'optimum-neuron-runtime[ray]'). Each has its
share of the cores. Ray replaces one that ends; another one then answers its requests that have no token yet. RAY_ADDRESS
names a cluster of several machines, each with the artifact at the same path."""

EXAMPLES = f"""\
examples:
  optimum-cli neuron serve smollm2/
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "smollm2", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
  optimum-cli neuron serve HuggingFaceTB/SmolLM2-135M-Instruct --sequence-length 2048
  optimum-cli neuron serve smollm2/ --backend engine --max-queue 32 --served-model-name chat
  {KEY_VARIABLE}=secret optimum-cli neuron serve smollm2/ --host 0.0.0.0 --port 80
  optimum-cli neuron serve smollm2/ --vllm-options --enable-auto-tool-choice --tool-call-parser hermes
  optimum-cli neuron serve smollm2/ --backend vllm --vllm-options --data-parallel-size 2
  optimum-cli neuron serve smollm2/ --backend engine --replicas 2
"""


class NeuronServeCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="serve", help="Serve an artifact to OpenAI's clients.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_named_model(parser)
        text = "server to run: vLLM, the engine of this package, or vLLM if it is installed (default: %(default)s)"
        parser.add_argument("--backend", choices=BACKENDS, default="auto", help=text)
        parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
        parser.add_argument("--port", type=int, default=8000, help="port to listen at (default: %(default)s)")
        for flag, metavar, text in TEXTS:
            add_option(parser, flag, metavar=metavar, help=text)
        for flag, kind, metavar, text in NUMBERS:
            add_number(parser, flag, metavar, text, kind=kind)
        add_rank_options(parser)
        add_option(parser, "--vllm-options", nargs=REMAINDER, help="all that follows goes to vllm serve")

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.export.first_use import open_named
        from optimum_neuron.tools.serve.process import has_vllm

        # Before torch is imported: wrong options and folders are reported at once.
        _check(args)
        # A key from a file often ends with a line break.
        key = args.api_key or os.environ.get(KEY_VARIABLE) or None
        if key is not None and (key != key.strip() or not key.isprintable()):
            name = "--api-key" if args.api_key else KEY_VARIABLE
            raise ValueError(f"{name} begins or ends with a space, or has a character that no header has; remove it")
        backend = args.backend
        if backend == "auto":
            backend = "vllm" if has_vllm() else "engine"
        elif backend == "vllm" and not has_vllm():
            raise ImportError(
                "--backend vllm needs vLLM: pip install 'optimum-neuron-runtime[vllm]', or use --backend engine"
            )
        _check_backend(args, backend)
        artifact = open_named(args)
        (_by_vllm if backend == "vllm" else _by_engine)(args, key, artifact.path)


def _check(args: Namespace) -> None:
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} must lie between 0 and 65535; 0 takes a free one")
    replicas, most, target = (getattr(args, name) for name in SCALE_OPTIONS)
    if replicas is not None and replicas < 1:
        raise ValueError(f"--replicas {replicas} must be at least 1")
    if most is not None and most <= (replicas or most):
        raise ValueError(
            f"--max-replicas {most} must be larger than --replicas, which is {replicas or 'not given'}; give both, or --replicas alone"
        )
    if target is not None and most is None:
        raise ValueError(
            f"--target-ongoing-requests {target:g} says when Ray adds a replica; give --max-replicas, too"
        )
    for flag, (takes_zero, allowed) in LIMITS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and not (0 < value < float("inf") or (takes_zero and value == 0)):
            raise ValueError(f"{flag} {value:g} must be {allowed}")
    for flag, *_ in TEXTS:
        if getattr(args, flag[2:].replace("-", "_")) == "":
            raise ValueError(f"{flag} is empty; give one, or leave it out")


def _check_backend(args: Namespace, backend: str) -> None:
    for option in ("max_queue", "drain_timeout", "step_timeout", *SCALE_OPTIONS):
        value = getattr(args, option)
        if backend == "vllm" and value is not None:
            other = "; for vLLM's own replicas add --vllm-options --data-parallel-size" if option == "replicas" else ""
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is an option of the engine's server, and vLLM serves; leave it out, or add "
                f"--backend engine{other}"
            )
    if backend == "engine" and args.vllm_options:
        raise ValueError(
            f"{' '.join(args.vllm_options)} are options of vLLM, and the engine serves; leave them out, or use --backend vllm"
        )


def _by_vllm(args: Namespace, key: str | None, path: Path) -> None:
    from optimum_neuron.tools.serve.process import become_vllm

    name, timeout = args.served_model_name or str(Path(args.model)), args.rank_timeout
    words = [str(path), "--served-model-name", name, "--host", args.host, "--port", str(args.port)]
    words += ["--trust-remote-code"] if args.trust_remote_code else []
    words += [] if args.otlp_traces_endpoint is None else ["--otlp-traces-endpoint", args.otlp_traces_endpoint]
    variables = {
        "VLLM_API_KEY": key,  # every user sees a key on a command line
        "OPTIMUM_NEURON_RANK_PYTHON": args.rank_python,
        "NEURON_RT_EXEC_TIMEOUT": None if timeout is None else f"{timeout:g}",
    }
    become_vllm([*words, *(args.vllm_options or ())], variables)  # vLLM's own options go last, so that they win


def _by_engine(args: Namespace, key: str | None, path: Path) -> None:
    missing = [name for name in SERVER_MODULES if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"the server needs {', '.join(missing)}: pip install 'optimum-neuron-runtime[serve]', or [vllm] to serve by vLLM"
        )
    if args.replicas is not None and find_spec("ray") is None:
        raise ImportError(f"--replicas {args.replicas} needs Ray Serve: pip install 'optimum-neuron-runtime[ray]'")
    if args.otlp_traces_endpoint is not None:
        from optimum_neuron.tools.serve.tracing import import_exporter

        import_exporter()  # replicas would report what is missing only when they load
    from optimum_neuron.tools.serve.process import open_socket

    with open_socket(args.host, args.port) as listening:
        from optimum_neuron.tools.serve.server import ServerOptions, serve_artifact

        options = ServerOptions(
            artifact=path,
            name=args.served_model_name or str(Path(args.model)),
            api_key=key,
            max_queue=DEFAULT_QUEUE if args.max_queue is None else args.max_queue,
            drain_timeout=DEFAULT_DRAIN if args.drain_timeout is None else args.drain_timeout,
            step_timeout=args.step_timeout or DEFAULT_STEP_TIMEOUT,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            **run_options(args),
        )
        if args.replicas is None:
            serve_artifact(options, listening)
            return
        from optimum_neuron.tools.serve.process import set_ray_environment

        joins = set_ray_environment()  # before Ray is imported
        from optimum_neuron.tools.serve.replicas.launch import serve_replicas

        most = args.max_replicas or args.replicas
        serve_replicas(options, args.replicas, most, args.target_ongoing_requests, listening, joins=joins)
