# SPDX-License-Identifier: Apache-2.0
"""vLLM's servers on two Ray nodes of the loopback, behind the front of `optimum-cli neuron serve`, while one node dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
import ray  # noqa: F401  where it is not installed this file fails, and with it `make test-vllm`
import requests
from serving import PATIENCE, Server, free_port, server_environment, serving, stop, wait_for


ROOT = Path(__file__).resolve().parents[2]
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
PROMPTS, STREAMS, TOKENS = 4, 8, 240
# optimum-cli with this folder's commands, whatever is installed.
CLI = f"""
import optimum.commands.register
optimum.commands.register.__path__ = [{str(ROOT / "commands")!r}]
from optimum.commands.optimum_cli import main
main()
"""


def start_node(*options: str, address: str, folder: Path) -> None:
    """`ray start`, as on a machine of its own: one replica has room on it."""
    command = [str(Path(sys.executable).with_name("ray")), "start", *options, "--node-ip-address", address]
    command += ["--num-cpus", "1", "--object-store-memory", "80000000", "--disable-usage-stats"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "120"}
    with (folder / f"{address}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env=server_environment(**variables),
            stdout=log,
            stderr=log,
            timeout=PATIENCE,
            check=True,
        )


def kill_node(folder: Path, address: str | None = None) -> None:
    """Kills a node of the cluster of a folder, the process that starts servers there, and the servers; or all nodes."""
    ours = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]
    if address is not None:
        ours = [each for each in ours if f"--node_ip_address={address}" in each.cmdline()]
        assert ours
    family = [process for each in ours for process in [each, *children(each)]]
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a cluster of two nodes, and its folder."""
    folder = tmp_path_factory.mktemp("ray")
    # Sockets have paths of at most 107 bytes.
    short = Path("/tmp") / f"ray-{os.getpid()}"
    port = free_port()
    try:
        start_node(
            "--head",
            "--port",
            str(port),
            "--include-dashboard",
            "false",
            "--temp-dir",
            str(short),
            address=HEAD,
            folder=folder,
        )
        start_node("--address", f"{HEAD}:{port}", address=OTHER, folder=folder)
        yield f"{HEAD}:{port}", short
    finally:
        kill_node(short)


def command(model: str | Path, *options: str) -> list[str]:
    return [sys.executable, "-c", CLI, "neuron", "serve", str(model), "--backend", "vllm", *options]


def replicas_up(server: Server) -> float:
    text = requests.get(f"{server.url}/metrics", timeout=PATIENCE).text
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("optimum_neuron:front_replica_up{")
    )


def servers(address: str) -> list[int]:
    """vLLM's servers of a node."""
    words = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [index for index, each in enumerate(words) if f"--host {address} --port" in each and "guard.py" not in each]


async def stream(server: Server, prompt: list[int], begun: asyncio.Event | None = None) -> list[int] | openai.APIError:
    """What one client gets: tokens, or a clear error. Tells when the first ones came."""
    tokens: list[int] = []
    try:
        answer = await server.async_client.completions.create(
            model=server.model, prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        async for event in answer:
            tokens += event.choices[0].token_ids or []
            if begun is not None:
                begun.set()
    except openai.APIError as error:
        return error
    return tokens


def test_clients_get_their_tokens_or_a_clear_error_while_a_node_dies(
    cluster: tuple[str, Path],
    export_text: Callable[..., Path],
    greedy: Callable[[list[int], int], list[int]],
    tmp_path: Path,
) -> None:
    address, folder = cluster
    prompts = [[100 + index, *range(200, 204)] for index in range(PROMPTS)] * (STREAMS // PROMPTS)
    expected = [greedy(prompt, TOKENS) for prompt in prompts[:PROMPTS]] * (STREAMS // PROMPTS)
    options = ["--data-parallel-size", "2", "--data-parallel-backend", "ray"]
    variables = {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with serving(tmp_path, export_text(), *options, command_of=command, **variables) as server:
        wait_for(lambda: replicas_up(server) == 2)

        async def ask() -> list[list[int] | openai.APIError]:
            begun = [asyncio.Event() for _ in prompts]
            clients = [asyncio.create_task(stream(server, *each)) for each in zip(prompts, begun, strict=True)]
            await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), PATIENCE)
            await asyncio.to_thread(kill_node, folder, OTHER)
            return await asyncio.wait_for(asyncio.gather(*clients), PATIENCE)

        answers = asyncio.run(ask())
        broken = [answer for answer in answers if isinstance(answer, openai.APIError)]
        assert len(broken) == STREAMS / 2
        assert all("died before the answer's end; send the request again" in str(error) for error in broken)
        assert all(answer == tokens for answer, tokens in zip(answers, expected, strict=True) if answer not in broken)
        # Whoever asks again is answered, by the node that is left.
        assert asyncio.run(stream(server, prompts[0])) == expected[0]
        assert replicas_up(server) == 1
        assert len(servers(HEAD)) == 1
        wait_for(lambda: "another one is started" in server.output())
        assert stop(server) == 0
        wait_for(lambda: not servers(HEAD) and not servers(OTHER))
