# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron serve`: who serves, by which command and at which address, and what is refused before anything is loaded."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers import Cli

from optimum_neuron.tools.serve import process
from optimum_neuron.tools.serve.process import open_socket


class BecameError(Exception):
    """What stands for a process that was replaced."""


@pytest.fixture
def became(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Runs the command where vLLM is installed; returns what the process became: its words and its environment."""

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        raise BecameError(path, words, environment)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(process, "has_vllm", lambda: True)

    def run(*words: str | Path) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(BecameError) as caught:
            cli("neuron", "serve", *words)
        path, arguments, environment = caught.value.args
        assert path == arguments[0] == sys.executable
        return arguments[1:], environment

    return run


@pytest.fixture
def refusal(artifact: Path, cli: Cli) -> Callable[..., str]:
    """Run the command, which has to refuse its options; return the sentence."""

    def run(*words: str) -> str:
        code, _, line = cli("neuron", "serve", artifact, *words)
        assert code == 1 and line.startswith("error: ") and line.count("\n") == 1
        return line

    return run


def test_where_vllm_is_installed_the_process_becomes_its_server_with_options_in_its_own_words_and_no_key_is_shown(
    artifact: Path, became: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, environment = became(artifact)
    expected = ["-m", "vllm.entrypoints.cli.main", "serve", str(artifact), "--served-model-name", str(artifact)]
    assert words == [*expected, "--host", "127.0.0.1", "--port", "8000"] and environment == dict(os.environ)
    monkeypatch.setenv("OPTIMUM_NEURON_API_KEY", "of the environment")
    ranks = ["--rank-python", "/py", "--rank-timeout", "7.5", "--api-key", "secret"]
    plain, traces = ["--host", "::1", "--port", "9", "--trust-remote-code"], ["--otlp-traces-endpoint", "http://c"]
    named, own = ["--served-model-name", "a b; c"], ["--data-parallel-size", "2", "--port", "10"]
    words, environment = became(artifact, "--backend", "vllm", *plain, *named, *ranks, *traces, "--vllm-options", *own)
    assert words[4:] == [*named, *plain, *traces, *own]
    found = {name: environment[name] for name in environment.keys() - os.environ.keys()}
    assert found == {"VLLM_API_KEY": "secret", "OPTIMUM_NEURON_RANK_PYTHON": "/py", "NEURON_RT_EXEC_TIMEOUT": "7.5"}
    assert became(artifact)[1]["VLLM_API_KEY"] == "of the environment"


WRONG = [
    (["--port", "70000"], "--port 70000 must lie between 0 and 65535"),
    (["--max-queue", "-1"], "--max-queue -1 must be at least 0"),
    (["--step-timeout", "0"], "--step-timeout 0 must be a number of seconds above 0"),
    (["--drain-timeout", "nan"], "--drain-timeout nan must be a number of seconds from 0 on"),
    (["--api-key", ""], "--api-key is empty"),
    (["--api-key", "se\ncret"], "--api-key begins or ends with a space, or has a character that no header has"),
    (["--otlp-traces-endpoint", ""], "--otlp-traces-endpoint is empty"),
    (["--replicas", "0"], "--replicas 0 must be at least 1"),
    (["--max-replicas", "2"], "--max-replicas 2 must be larger than --replicas, which is not given"),
    (["--replicas", "2", "--target-ongoing-requests", "3"], "--target-ongoing-requests 3 says when Ray adds a"),
    (["--replicas", "1", "--max-replicas", "2", "--target-ongoing-requests", "0"], "--target-ongoing-requests 0 must be a number above 0"),
    (["--served-model-name", ""], "--served-model-name is empty"),
    (["--backend", "vllm"], "--backend vllm needs vLLM: pip install 'optimum-neuron-runtime[vllm]'"),
    (["--vllm-options", "--seed", "1"], "--seed 1 are options of vLLM, and the engine serves"),
    (["--host", "no such host"], "no such host:8000 cannot be listened at"),
]  # fmt: skip


def test_wrong_options_are_refused(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "has_vllm", lambda: False)
    for options, words in WRONG:
        assert words in refusal(*options)


def test_an_option_that_the_backend_lacks_and_a_missing_package_are_named_with_what_brings_them(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("optimum.commands.register.neuron_serve")
    monkeypatch.setattr(module, "SERVER_MODULES", ("starlette", "no_such_package"))
    line = refusal("--backend", "engine")
    assert "the server needs no_such_package: pip install 'optimum-neuron-runtime[serve]'" in line
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "ray" else name)
    line = refusal("--backend", "engine", "--replicas", "2")
    assert line == "error: --replicas 2 needs Ray Serve: pip install 'optimum-neuron-runtime[ray]'\n"
    monkeypatch.setattr(process, "has_vllm", lambda: True)
    for option, value in (("--max-queue", "5"), ("--drain-timeout", "5.0"), ("--replicas", "2")):
        line = refusal(option, value)
        assert f"{option} {value} is an option of the engine's server, and vLLM serves" in line
    assert "for vLLM's own replicas add --vllm-options --data-parallel-size" in line


def test_a_folder_named_vllm_is_not_vllm() -> None:
    """tests/vllm is on the path here."""
    try:
        import vllm
    except ModuleNotFoundError:
        assert not process.has_vllm()
    else:
        assert process.has_vllm() == (vllm.__file__ is not None)


def test_help_shows_examples(cli: Cli) -> None:
    _, shown, _ = cli("neuron", "serve", "--help")
    told = (
        "examples:",
        "curl http://127.0.0.1:8000/v1/chat",
        "--max-queue REQUESTS",
        "(default: 127.0.0.1)",
        "429",
        "503",
    )
    assert all(words in shown for words in told)


def rival(reuse: tuple[int, ...]) -> socket.socket:
    made = socket.socket()
    for option in reuse:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    return made


@pytest.mark.parametrize(
    ("ours", "theirs", "reuse"),
    [
        ("127.0.0.1", "0.0.0.0", (socket.SO_REUSEADDR,)),
        ("0.0.0.0", "127.0.0.1", (socket.SO_REUSEADDR, socket.SO_REUSEPORT)),
    ],
)
def test_no_other_socket_takes_the_port_while_a_model_loads(ours: str, theirs: str, reuse: tuple[int, ...]) -> None:
    with open_socket(ours, 0) as listening, closing(rival(reuse)) as other:
        with pytest.raises(OSError, match="Address already in use"):
            other.bind((theirs, listening.getsockname()[1]))
            other.listen()
        # Who connects reaches the server.
        with socket.create_connection(("127.0.0.1", listening.getsockname()[1]), 5) as client:
            accepted, address = listening.accept()
            accepted.close()
            assert address == client.getsockname()


def test_a_port_goes_to_the_first_that_listens() -> None:
    with closing(rival((socket.SO_REUSEADDR,))) as other:
        other.bind(("127.0.0.1", 0))
        with open_socket(*other.getsockname()), pytest.raises(OSError, match="Address already in use"):
            other.listen()
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port} cannot be listened at \(Address already in use\)"):
            open_socket("127.0.0.1", port)
