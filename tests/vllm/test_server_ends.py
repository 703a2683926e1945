# SPDX-License-Identifier: Apache-2.0
"""How a server ends: asked to, it finishes what runs and leaves nothing behind; with a dead engine, it says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest
from serving import Server, is_healthy, serving, stop, wait_for


PROMPT = [7, 8, 9]


def start_stream(server: Server, new_tokens: int) -> openai.Stream[openai.types.Completion]:
    """A request that has its first token."""
    stream = server.client.completions.create(
        model=server.model,
        prompt=PROMPT,
        max_tokens=new_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    next(stream)
    return stream


def test_sigterm_finishes_the_running_request_and_leaves_no_process(
    export_text: Callable[..., Path], tmp_path: Path
) -> None:
    with serving(tmp_path, export_text()) as server:
        family = server.processes()
        assert len(server.engines()) == 1
        stream = start_stream(server, 200)
        code = stop(server)
        rest = sum(len(piece.choices[0].token_ids) for piece in stream)
        assert 1 + rest == 200
        assert code == 0
        assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert "force killing" not in server.output()


def test_a_killed_engine_is_reported_to_its_clients_and_ends_the_server(
    export_text: Callable[..., Path], tmp_path: Path
) -> None:
    with serving(tmp_path, export_text()) as server:
        (engine,) = server.engines()
        stream = start_stream(server, 500)
        engine.kill()
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        wait_for(lambda: server.process.poll() is not None)
        assert not is_healthy(server)
        assert "EngineDeadError" in server.output()
