# SPDX-License-Identifier: Apache-2.0
"""A sync that is killed, at whatever moment, leaves whole entries or none on both sides, and the next one does the rest."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from cached import KEY, OTHER, move_away, store
from helpers import folder_bytes
from hub_server import REPO, TOKEN, LoopbackHub
from huggingface_hub import HfApi

from optimum_neuron.targets.cache.hub import sync
from optimum_neuron.targets.cache.prune import verify
from optimum_neuron.targets.cache.store import CompileCache


# What changes something outside of a process, or asks the Hub to.
STEPS: tuple[tuple[Any, str], ...] = (
    (HfApi, "hf_hub_download"),
    (HfApi, "create_commit"),
    (Path, "rename"),
    (shutil, "rmtree"),
)


def killed_before(moment: int) -> bool:
    """Syncs in a process that is killed before a step, counted from 0; whether there were so many."""
    huggingface_hub.close_session()
    pid = os.fork()
    if pid == 0:
        passed = iter(range(moment + 1))

        def killing(step: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(passed) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(*args, **kwargs)

            return call

        for owner, name in STEPS:
            setattr(owner, name, killing(getattr(owner, name)))
        try:
            sync(REPO, token=TOKEN)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_sync_that_is_killed_leaves_nothing_wrong(
    hub: LoopbackHub, cache: CompileCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = folder_bytes(store(cache, folder, KEY))
    sync(REPO, token=TOKEN)
    shared = list(hub.commits)
    move_away(monkeypatch)
    moment, partly = 0, 0
    while True:
        own = CompileCache("neuron")
        ours = folder_bytes(store(own, folder, OTHER))
        if not killed_before(moment):
            break
        assert [problem for _, problem in verify(remove=False)] == [None] * len(list(own.folder.glob("[0-9a-f]*")))
        entries = {path.name: folder_bytes(path) for path in own.folder.glob("[0-9a-f]*")}
        assert entries in ({OTHER: ours}, {OTHER: ours, KEY: theirs})
        sent = {name for name in hub.files if OTHER in name}
        assert sent in (set(), {f"neuron/{OTHER}/{name}" for name in ours})
        partly += len(entries) == 2 and not sent
        done = sync(REPO, token=TOKEN)
        assert done.downloaded == ([] if KEY in entries else [f"neuron/{KEY}"]) and not done.refused
        assert done.uploaded == ([] if sent else [f"neuron/{OTHER}"])
        if done.downloaded or done.uploaded:  # who writes removes what a killed one left
            assert {path.name for path in own.folder.iterdir()} == {KEY, OTHER}
        assert folder_bytes(own.folder / KEY) == theirs
        shutil.rmtree(own.folder)
        hub.commits[:] = shared
        moment += 1
    assert moment >= 10 and partly >= 2
