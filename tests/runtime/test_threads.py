# SPDX-License-Identifier: Apache-2.0
"""A thread that has computed keeps no OpenMP workers, which would slow another one down."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import export_tiny, python_process

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.generate import model as modeling


COUNTS = """
import os, time, torch
from optimum_neuron.runtime.process import end_idle_workers

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = threads()
numbers = torch.ones(4_000_000)
with_workers = threads()
end_idle_workers()
limit = time.monotonic() + 60
while threads() > before and time.monotonic() < limit:
    time.sleep(0.01)
print(with_workers - before, threads() - before, int(numbers.sum()), threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")
def test_workers_end_and_come_back_for_the_next_computation() -> None:
    output, errors = python_process(COUNTS).communicate(timeout=120)
    assert output.split() == ["2", "0", "4000000", "2"], errors


FORKS = """
import os, signal, torch
import optimum_neuron.runtime.process

def compute():
    return int(torch.ones(4_000_000).sum())

torch.set_num_threads(2)
compute()
if not os.fork():
    signal.alarm(100)
    os._exit(compute() == 4_000_000)
print(os.waitstatus_to_exitcode(os.wait()[1]), compute())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")
def test_a_forked_process_can_compute_with_a_model_of_its_own() -> None:
    output, errors = python_process(FORKS).communicate(timeout=200)
    assert output.split() == ["1", "4000000"], errors


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")
def test_an_openmp_that_cannot_end_workers_is_left_alone() -> None:
    old = (
        "import torch; import ctypes; ctypes.CDLL = lambda path: object(); from optimum_neuron.runtime import process"
    )
    script = f"{old}; process.end_idle_workers(); print(process._libraries())"
    output, errors = python_process(script).communicate(timeout=120)
    assert output.strip() == "()", errors


def test_every_call_that_computes_ends_its_workers(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(modeling, "end_idle_workers", lambda: ended.append(threading.get_ident()))
    model = NeuronModelForCausalLM.from_pretrained(export_tiny(tiny_checkpoint, tmp_path / "artifact"))
    prompt = torch.arange(5)[None]
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    assert ended == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        model.generate(prompt, max_new_tokens=2, do_sample=False, stopping_criteria=[lambda *_: 1 // 0])
    assert len(ended) == 2
    model.generate_batch([[0, 1, 2, 3, 4]], max_new_tokens=2)
    assert len(ended) == 3
    with model.serve():
        assert len(ended) == 4
