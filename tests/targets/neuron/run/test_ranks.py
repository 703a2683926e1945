# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a process per rank, or all ranks in one; dead, failing and silent ranks; what is left afterwards."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.graphs import copy_graph, step_graph
from fakes.tools import NeuronTools, Sdk, cache_like, children, make_plan
from helpers import read_state, run_tensors, write_state

from optimum_neuron.arrays import to_numpy
from optimum_neuron.targets import IN_ENVIRONMENT, RankOptions
from optimum_neuron.targets.neuron.run import rank_process, ranks
from optimum_neuron.targets.neuron.run.load_plan import LoadPlan
from optimum_neuron.targets.neuron.run.ranks import RankedExecutable, StartedStep
from optimum_neuron.targets.neuron.sdk.errors import NeuronRuntimeError


pytest_plugins = ("fakes.plugin",)
RANKS = 2
STATE = "kv_cache.key_0"


def rank_weights(rank: int) -> dict[str, torch.Tensor]:
    return {"model.weight": cache_like(1.0 + rank), "tensor_parallel.rank": cache_like(rank, dtype=torch.int32)}


def two_ranks(folder: Path, target: str) -> LoadPlan:
    """Graphs and weights of two ranks: rank r adds r in each step, and has weight 1 + r."""
    weights = [rank_weights(rank) for rank in range(RANKS)]
    graphs = [step_graph(size=1, ranks=RANKS), copy_graph(ranks=RANKS)]
    return make_plan(folder, graphs, target, *weights)


@pytest.fixture
def load(neuron_sdk: Sdk, tmp_path: Path) -> Any:
    loaded: list[RankedExecutable] = []

    def load_ranks(
        packages: str = "nrt", target: str = "trn2", options: RankOptions = IN_ENVIRONMENT
    ) -> RankedExecutable:
        neuron_sdk(target, packages)
        executable = RankedExecutable(two_ranks(tmp_path / "graphs", target), options)
        loaded.append(executable)
        return executable

    yield load_ranks
    for executable in loaded:
        executable.close()


Load = Callable[..., RankedExecutable]


def processes(loaded: RankedExecutable) -> list[subprocess.Popen[bytes]]:
    return [rank.process for rank in loaded._ranks]


def child_of(guard: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text())


def environment(process: subprocess.Popen[bytes]) -> dict[str, str]:
    entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)


def begin(loaded: RankedExecutable, x: float, *, logits: bool = False) -> StartedStep:
    return loaded.start("token_generation", [to_numpy(cache_like(x))], logits=logits)


def run(loaded: RankedExecutable, x: float = 1.0) -> torch.Tensor:
    return run_tensors(loaded, "token_generation", [cache_like(x)])[0]


def check_results(loaded: RankedExecutable) -> None:
    """Rank 1 has weight 2, and adds its rank to the state."""
    assert torch.equal(run(loaded, 3.0), cache_like(6.0))
    assert torch.equal(read_state(loaded, STATE), torch.cat([cache_like(3.0), cache_like(7.0)], dim=1))
    write_state(loaded, STATE, torch.cat([cache_like(10.0), cache_like(20.0)], dim=1))
    assert torch.equal(run(loaded), cache_like(22.0))
    assert torch.equal(read_state(loaded, STATE), torch.cat([cache_like(11.0), cache_like(23.0)], dim=1))
    loaded.copy_slot(2, 3, 4)
    assert torch.equal(read_state(loaded, STATE), torch.cat([cache_like(16.0)] * 2, dim=1))
    with pytest.raises(ValueError, match=r"a state of 1 heads or channels is not that of 2 ranks"):
        write_state(loaded, STATE, cache_like(1.0))


def test_each_rank_has_its_own_core_and_weights_and_rank_0_answers(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "2-3")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    monkeypatch.setenv("FAKE_NEURON_CPUS", f"{min(os.sched_getaffinity(0))},9999")
    loaded = load()
    assert all(os.sched_getaffinity(child_of(each)) == {min(os.sched_getaffinity(0))} for each in processes(loaded))
    found = [environment(process) for process in processes(loaded)]
    assert [each["NEURON_RT_VISIBLE_CORES"] for each in found] == ["2", "3"]
    alike = {"NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_IO_RING_CACHE_SIZE": "32", "NEURON_RT_EXEC_TIMEOUT": "600"}
    alike["NEURON_RT_ROOT_COMM_ID"] = f"{found[0]['MASTER_ADDR']}:{found[0]['MASTER_PORT']}"  # one place to meet
    assert all(
        alike.items() <= each.items() and not {"NEURON_RT_NUM_CORES", "NEURON_VISIBLE_DEVICES"} & {*each}
        for each in found
    )
    assert not [name for each in found for name in each if name.startswith("NEURON_RT_INSPECT")]
    check_results(loaded)


@pytest.mark.parametrize(("packages", "target", "count"), [("nrt", "trn3", 2), ("nxd", "inf2", 1)])
def test_every_process_captures_a_profile_where_one_is_asked_for(
    packages: str, target: str, count: int, load: Load, tmp_path: Path
) -> None:
    folder = tmp_path / "device"
    folder.mkdir()
    loaded = load(packages, target, RankOptions(capture=folder))
    found = [environment(process) for process in processes(loaded)]
    assert [each["NEURON_RT_VISIBLE_CORES"] for each in found] == (["0", "1"] if count == 2 else ["0,1"])
    for each in found:
        assert each["NEURON_RT_INSPECT_ENABLE"] == "1" and each["NEURON_RT_INSPECT_OUTPUT_DIR"] == str(folder)
    assert all(rank.grace == rank_process.CAPTURE_GRACE for rank in loaded._ranks)
    check_results(loaded)
    captured = [path.name for path in folder.glob("i-fake_pid_*/token*.ntff")]
    assert sorted(captured) == [f"token_generation_vnc_{rank}.ntff" for rank in range(RANKS)]
    assert len(list(folder.iterdir())) == count


@pytest.mark.parametrize(("rank", "died"), [(1, "SIGKILL"), (0, "SIGTERM")])
def test_a_rank_that_died_in_a_step_or_before_it_is_told_and_ends_the_others(
    load: Load, neuron_tools: NeuronTools, rank: int, died: str
) -> None:
    loaded = load()
    if died == "SIGKILL":
        neuron_tools.break_device(rank=rank, signal=int(signal.SIGKILL))
    else:
        victim = processes(loaded)[rank]
        os.kill(child_of(victim), signal.SIGTERM)
        victim.wait()
    message = (
        f"graph token_generation failed: the process of rank {rank} of 2 was ended by {died}; load the model again"
    )
    for _ in range(2):
        with pytest.raises(NeuronRuntimeError, match=message) as error:
            run(loaded)
        assert not error.value.recoverable
    assert all(process.poll() is not None for process in processes(loaded))


def test_a_silent_rank_is_ended(load: Load, neuron_tools: NeuronTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", "2")
    monkeypatch.setattr(ranks, "_SLACK", 1)
    loaded = load()
    for rank in loaded._ranks:
        rank.grace = 0.5
    neuron_tools.break_device(rank=0, hang=True)
    with pytest.raises(
        NeuronRuntimeError,
        match=r"failed: rank 0 of 2.* did not answer within 3 s, which is NEURON_RT_EXEC_TIMEOUT=2 and 1 more; .* raise",
    ):
        run(loaded)
    assert all(process.poll() is not None for process in processes(loaded))


def test_loading_that_fails_on_a_rank_leaves_no_process(neuron_sdk: Sdk, tmp_path: Path) -> None:
    neuron_sdk("trn2", "nrt")
    plan = two_ranks(tmp_path / "graphs", "trn2")
    before = children()
    plan.neff("token_generation").write_bytes(b"x" * 5000)
    with pytest.raises(NeuronRuntimeError, match=r"rank [01] of 2: loading graph token_generation .*NRT_INVALID"):
        RankedExecutable(plan)
    assert children() == before


def held_files() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:optimum_neuron")


def test_processes_memory_and_events_end_on_close_and_when_nobody_holds_the_object(load: Load, tmp_path: Path) -> None:
    loaded = load()
    started = processes(loaded)
    loaded.close()
    assert [process.poll() for process in started] == [0, 0]
    with pytest.raises(RuntimeError, match="the model was closed; load it again"):
        run(loaded)
    before = held_files()
    held: Any = RankedExecutable(two_ranks(tmp_path / "graphs", "trn2"))
    started = processes(held)
    del held
    assert held_files() == before
    assert [process.poll() for process in started] == [0, 0]


def test_steps_run_in_order_and_the_next_one_is_told_while_one_runs(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load()
    answered: list[str] = []
    end_step = RankedExecutable._end_step

    def noted(self: RankedExecutable, doing: str, number: int) -> Any:
        answered.append(doing)
        return end_step(self, doing, number)

    monkeypatch.setattr(RankedExecutable, "_end_step", noted)
    first, second = (begin(loaded, x) for x in (1.0, 2.0))
    assert answered == []  # both are told, and nothing was waited for
    third = begin(loaded, 3.0)
    assert len(answered) == 1  # its inputs lie where those of the first did
    with pytest.raises(ValueError, match="broadcast"):
        loaded.start("token_generation", [np.zeros(7, np.float32)], logits=False)  # takes no other step's place
    fourth = begin(loaded, 4.0)
    # The state adds up, and is doubled in what a step returns.
    assert torch.equal(read_state(loaded, STATE)[:, :1], cache_like(10.0))
    for step, total in ((fourth, 20.0), (third, 12.0), (second, 6.0), (first, 2.0)):
        (found,) = step()
        assert found.item() == total and step()[0] is found
    begin(loaded, 1.0)  # nobody waits for it
    assert torch.equal(run(loaded), cache_like(24.0))


def test_a_step_that_failed_on_a_rank_is_told_by_itself_and_the_next_one_runs_unless_it_is_the_end(
    load: Load, neuron_tools: NeuronTools
) -> None:
    loaded = load()
    neuron_tools.break_device(rank=1, message="NRT Error NRT_EXEC_NC_BUSY(1005): Failed to execute model")
    first, second = (begin(loaded, x) for x in (1.0, 2.0))
    assert second()[0].item() == 6.0
    for _ in range(2):
        with pytest.raises(NeuronRuntimeError, match=r"rank 1 of 2: graph token_generation .*\(1005\)") as error:
            first()
        assert error.value.recoverable and error.value.code == 1005
    assert torch.equal(run(loaded, 5.0), cache_like(16.0))
    neuron_tools.break_device(rank=1, message="NRT Error NRT_EXEC_HW_ERR_COLLECTIVES(1200): Failed to execute model")
    both = [begin(loaded, x) for x in (1.0, 2.0)]
    for step in (*both, lambda: run(loaded)):
        with pytest.raises(NeuronRuntimeError, match=r"rank 1 of 2: .*\(1200\): a collective operation is") as error:
            step()
        assert error.value.code == 1200
    assert all(process.poll() is not None for process in processes(loaded))


def test_only_rank_0_reads_and_only_what_is_wanted(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "transfers"
    noted.mkdir()
    monkeypatch.setenv("FAKE_NEURON_TRANSFERS", str(noted))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "2-3")
    loaded = load()
    for count in range(1, 4):
        begin(loaded, 1.0)()
        assert (noted / "2").read_text().split() == ["4"] * count  # one read of a float32 per step
    assert not (noted / "3").exists()
    monkeypatch.setattr(ranks, "LOGITS", ".y")
    assert begin(loaded, 1.0)() == [None]
    assert len((noted / "2").read_text().split()) == 3
    (found,) = begin(loaded, 1.0, logits=True)()
    assert found.item() == 10.0


def test_an_interrupted_step_does_not_answer_the_next_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()

    def interrupted(*arguments: Any) -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loaded._steps, "wait", interrupted)
        run(loaded)
    with pytest.raises(NeuronRuntimeError, match=r"graph token_generation was interrupted; load the model again"):
        run(loaded)
