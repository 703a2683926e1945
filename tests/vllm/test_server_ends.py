# SPDX-License-Identifier: Apache-2.0
"""How a server ends: asked to, it finishes what runs and leaves nothing behind; with a dead engine, it says so."""

from __future__ import annotations

import openai
import psutil
import pytest
from serving import Server, is_healthy, stop, wait_for


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


def test_sigterm_finishes_the_running_request_and_leaves_no_process(text_server: Server) -> None:
    family = text_server.processes()
    assert len(text_server.engines()) == 1
    stream = start_stream(text_server, 200)
    code = stop(text_server)
    rest = sum(len(piece.choices[0].token_ids) for piece in stream)
    assert 1 + rest == 200
    assert code == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert "force killing" not in text_server.output()


def test_a_killed_engine_is_reported_to_its_clients_and_ends_the_server(text_server: Server) -> None:
    (engine,) = text_server.engines()
    stream = start_stream(text_server, 500)
    engine.kill()
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    wait_for(lambda: text_server.process.poll() is not None)
    assert not is_healthy(text_server)
    assert "EngineDeadError" in text_server.output()
