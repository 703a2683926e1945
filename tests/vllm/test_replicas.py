# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one server: each has its own process and, on a Neuron host, its own cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import serving, stop

from optimum_neuron.targets.neuron.sdk.devices import VISIBLE_CORES, VISIBLE_DEVICES, take_replica_cores


REPLICAS = 2


def test_two_replicas_share_the_requests_and_answer_alike(
    export_text: Callable[..., Path], greedy: Callable[[list[int], int], list[int]], tmp_path: Path
) -> None:
    options = ["--data-parallel-size", str(REPLICAS), "--api-server-count", "1"]
    with serving(tmp_path, export_text(), *options) as server:
        assert len(server.engines()) == REPLICAS
        assert not [process for process in server.processes() if "VLLM::Worker" in " ".join(process.cmdline())]

        def ask(prompt: list[int]) -> list[int]:
            extra = {"return_token_ids": True, "ignore_eos": True}
            answer = server.client.completions.create(
                model=server.model, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
            )
            return answer.choices[0].token_ids

        prompts = [[100 + index, *range(200, 200 + 3 * index)] for index in range(12)]
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(ask, prompts))
        assert answers == [greedy(prompt, 8) for prompt in prompts]
        shares = [server.metric("request_success_total", engine=str(engine)) for engine in range(REPLICAS)]
        assert sum(shares) == len(prompts)
        assert all(shares)
        server.wait_idle()
        family = server.processes()
        assert stop(server) == 0
        assert not [process for process in family if process.is_running()]


@pytest.mark.parametrize(
    ("replica", "ranks", "visible", "taken"),
    [(0, 2, None, None), (1, 2, None, "2,3"), (0, 2, "4-9", "4,5"), (2, 2, "4-9", "8,9"), (1, 1, "7,3", "3")],
)
def test_a_replica_takes_the_cores_behind_those_of_the_replicas_before_it(
    replica: int, ranks: int, visible: str | None, taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_CORES, visible or "")  # so that what is set below is undone
    if visible is None:
        monkeypatch.delenv(VISIBLE_CORES)
    else:
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
    take_replica_cores(replica, ranks)
    assert os.environ.get(VISIBLE_CORES) == taken and VISIBLE_DEVICES not in os.environ


def test_more_replicas_than_visible_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_CORES, "4-7")
    with pytest.raises(RuntimeError, match=r"NEURON_RT_VISIBLE_CORES=4-7"):
        take_replica_cores(2, 2)
    assert os.environ[VISIBLE_CORES] == "4-7"
