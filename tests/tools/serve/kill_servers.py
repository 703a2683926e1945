# SPDX-License-Identifier: Apache-2.0
"""Kills servers at random moments of their start and of their answers: `python tests/tools/serve/kill_servers.py [--kills 20] [--seed 0]`.

After each kill nothing runs on, the artifact is as it was, the cache of kernels holds whole entries only, clients are told, and the next
server takes the same port and answers as the first one did. Takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path


ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import httpx2  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from conftest import TINY_CONFIGS, tiny_tokenizer  # noqa: E402
from optimum_neuron.artifact.artifact import Artifact  # noqa: E402
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE  # noqa: E402
from optimum_neuron.config import NeuronConfig  # noqa: E402
from optimum_neuron.export.recipe import export_model  # noqa: E402
from optimum_neuron.targets.cache.verify import verify  # noqa: E402


MARK = "KILL_SERVERS_MARK"
SERVE = [sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()", "neuron", "serve"]
BODY = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 48, "temperature": 0, "ignore_eos": True}
# Seconds in which whatever a killed server started has to end, and in which a server has to be up.
PATIENCE, START = 20.0, 300.0


def check(condition: object, message: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {message}")


class Place:
    """An artifact and a port; every process started here carries a mark."""

    def __init__(self, folder: Path) -> None:
        self.artifact, self.mark = folder / "tiny", uuid.uuid4().hex
        self.started: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        AutoModelForCausalLM.from_config(TINY_CONFIGS["llama"](), dtype=torch.float32).save_pretrained(
            folder / "checkpoint"
        )
        tiny_tokenizer().save_pretrained(folder / "checkpoint")
        sizes = NeuronConfig(batch_size=2, sequence_length=64, prefill_chunk_size=8, dtype="float32", target="cpu")
        export_model(folder / "checkpoint", self.artifact, config=sizes)

    def start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [
            *SERVE,
            str(self.artifact),
            "--backend",
            "engine",
            "--served-model-name",
            "tiny",
            "--port",
            str(self.port),
        ]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def end(self) -> None:
        """Leaves no server behind, also where a check has failed."""
        for process in self.started:
            process.kill()

    def up(self, process: subprocess.Popen[bytes]) -> float:
        """Seconds until the server is ready."""
        start = time.monotonic()
        while True:
            try:
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return time.monotonic() - start
            except httpx2.TransportError:
                check(process.poll() is None, f"the server ended with {process.returncode} while it started")
            check(time.monotonic() - start < START, "the server did not start")
            time.sleep(0.02)

    def answer(self) -> str:
        response = httpx2.post(f"{self.url}/v1/completions", json=BODY, timeout=START)
        check(response.status_code == 200, response.text)
        return str(response.json()["choices"][0]["text"])

    def wait_for_silence(self) -> None:
        start, mark = time.monotonic(), self.mark.encode()
        while True:
            running = []
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                        running.append(int(entry.name))
                except OSError:
                    continue  # it has ended
            if not running:
                return
            check(time.monotonic() - start < PATIENCE, f"still running: {running}")
            time.sleep(0.05)


def ask(place: Place, told: list[str]) -> None:
    """A client that goes on until its server is gone; what it was told last is kept."""
    try:
        while True:
            place.answer()
    except httpx2.TransportError as error:
        told.append(type(error).__name__)


def kill_one(place: Place, moment: float, serving: bool, expected: str) -> None:
    process, told = place.start(), list[str]()
    clients = []
    if serving:
        place.up(process)
        clients = [threading.Thread(target=ask, args=(place, told)) for _ in range(3)]
        for client in clients:
            client.start()
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for client in clients:
        client.join(PATIENCE)
    check(len(told) == len(clients), "a client of a killed server waits for ever")
    place.wait_for_silence()
    Artifact.open(place.artifact).verify()
    for entry, problem in verify(remove=False):
        check(problem is None, f"half an entry in the cache: {entry.path}: {problem}")
    process = place.start()
    place.up(process)
    check(place.answer() == expected, "another answer than before")
    process.terminate()
    check(process.wait(PATIENCE) == 0, f"an orderly end has the status {process.returncode}")
    place.wait_for_silence()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(CACHE_VARIABLE, str(Path(folder) / "cache"))
        place = Place(Path(folder))
        try:
            kill_many(place, args.kills, generator)
        finally:
            place.end()


def kill_many(place: Place, kills: int, generator: random.Random) -> None:
    process = place.start()
    seconds = place.up(process)
    expected = place.answer()
    process.terminate()
    process.wait(PATIENCE)
    for turn in range(kills):
        serving = turn % 2 == 1
        moment = generator.uniform(0, 0.5 if serving else seconds)
        kill_one(place, moment, serving, expected)
        sys.stdout.write(f"{turn + 1}: killed {moment:.2f} s into its {'answers' if serving else 'start'}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
