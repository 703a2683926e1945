# SPDX-License-Identifier: Apache-2.0
"""How a program ends that closes nothing, and what is left of a service in a process that was forked from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import export_tiny
from warm_process import WarmProcess


# Longer than anything here takes: a program that is not over by then hangs.
LIMIT = 240
PROGRAM = """
import os, sys, threading, torch
from optimum_neuron import NeuronModelForCausalLM, Request
sizes = {"target": "eager", "batch_size": 3, "sequence_length": 64, "prefill_chunk_size": 8} if "export" in sys.argv else {}
model = NeuronModelForCausalLM.from_pretrained(sys.argv[1], **sizes)

def request(name, new_tokens=60):
    return Request(request_id=str(name), prompt_token_ids=[5, 6, 7], max_new_tokens=new_tokens)
"""


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tiny_checkpoint, tmp_path_factory.mktemp("ends") / "artifact")


def ended(path: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    """The exit code and outputs of a program over a model."""
    process = WarmProcess(PROGRAM + script, path, *arguments)
    try:
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, output, errors


SERVICE = """
service = model.serve()
streams = [service.submit(request(name)) for name in range(20)]
next(streams[0])
"""
MANAGER = """
manager = model.init_continuous_batching()
manager.start()
manager.add_requests([[5, 6, 7]] * 20, max_new_tokens=60)
first = manager.get_result()
"""


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (SERVICE + "sys.exit(3)", 3),
        (SERVICE + "1 / 0", 1),
        pytest.param(SERVICE + "del service, streams", 0, marks=pytest.mark.full),
        pytest.param(MANAGER + "sys.exit(3)", 3, marks=pytest.mark.full),
        (MANAGER + "manager.stop(block=False); sys.exit(3)", 3),
    ],
    ids=["by exit", "by an error", "at its end", "a manager", "a manager that stops"],
)
def test_a_program_that_leaves_a_service_open_ends_with_its_own_code(artifact: Path, script: str, code: int) -> None:
    returned, _, errors = ended(artifact, script)
    assert returned == code, errors
    assert "terminate called" not in errors and ("Traceback" in errors) == ("1 / 0" in script), errors


def test_at_the_end_what_still_runs_is_aborted_after_threads_have_read_what_they_wait_for(artifact: Path) -> None:
    script = """
import atexit
ends = []
atexit.register(lambda: print(sum(item == "abort" for item in ends) > 0, len(ends), flush=True))
service = model.serve()

def read(stream):
    print(len(list(stream)), stream.finish_reason, flush=True)

threading.Thread(target=read, args=(service.submit(request("read", 40)),)).start()
for name in range(60):
    service.subscribe(request(name, 55), lambda item: ends.append(item) if isinstance(item, str) or item.finish_reason else None)
"""
    code, output, errors = ended(artifact, script)
    lines = output.splitlines()
    assert (code, lines) == (0, ["40 length", "True 60"]), errors


def test_a_callback_that_never_returns_does_not_keep_a_program_from_ending(artifact: Path) -> None:
    script = """
from optimum_neuron.engine import service as module
module._AT_EXIT = 0.2
called = threading.Event()

def put(item):
    called.set()
    threading.Event().wait()

service = model.serve()
service.subscribe(request("a"), put)
called.wait()
sys.exit(3)
"""
    code, _, errors = ended(artifact, script)
    assert (code, "terminate called" in errors) == (3, False), errors


# What a child must be refused, and then that its end, which closes and drops what it got, changes nothing for its parent.
FORK = """
import asyncio, multiprocessing, signal

def refused(call):
    try:
        call()
    except RuntimeError as error:
        return "forked" in str(error)
    return False

async def read_one():
    return await anext(stream)

def child():
    signal.alarm(150)
    print(*map(refused, calls), flush=True)
    end()
    sys.exit(5)

def hold(held, done):
    with lock:
        held.set()
        done.wait()

def fork():
    held, done = threading.Event(), threading.Event()
    threading.Thread(target=hold, args=(held, done)).start()
    held.wait()
    pid = os.fork()
    if not pid:
        child()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    other = multiprocessing.get_context("fork").Process(target=child)
    other.start()
    other.join()
    done.set()
    print(code, other.exitcode, flush=True)

prompt = torch.tensor([[5, 6, 7]])
computing = [
    lambda: model.generate(prompt, max_new_tokens=2),
    lambda: model(prompt, logits_to_keep=1),
    lambda: model.generate_batch([[5]], max_new_tokens=2),
    lambda: model.runner.warm_up(),
    lambda: model.runner.copy_block(0, 1, 1),
    model.serve,
]
"""
FORKED_MODEL = """
model.generate(prompt, max_new_tokens=2, do_sample=False)
calls, lock, end = computing, model._lock, lambda: None
fork()
print(model.generate(prompt, max_new_tokens=2, do_sample=False).shape[1])
"""
FORKED_SERVICE = """
service = model.serve()
stream = service.submit(request("a", 50))
next(stream)
calls = [
    *computing,
    lambda: service.submit(request("b")),
    lambda: service.subscribe(request("c"), print),
    lambda: service.abort_request("a"),
    lambda: next(stream),
    lambda: asyncio.run(read_one()),
    stream.abort,
]
lock = service._lock

def end():
    global stream
    stream.close()
    del stream
    service.close()

fork()
print(len(list(stream)))
service.close()
"""
FORKED_MANAGER = """
manager = model.init_continuous_batching()
manager.start()
manager.add_request([5, 6, 7], max_new_tokens=20)
calls = [*computing, manager.get_result, lambda: manager.add_request([5]), lambda: manager.cancel_request("req_0")]
lock, end = manager._arrived, manager.stop
fork()
print(len(manager.get_result().generated_tokens))
manager.stop()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_refused_what_would_never_end(artifact: Path) -> None:
    """Also where a thread, which the child does not have, held a lock in that moment: the model's, a service's, a manager's."""
    code, output, errors = ended(artifact, FORK + FORKED_MODEL + FORKED_SERVICE + FORKED_MANAGER)
    assert code == 0, errors
    expected: list[str] = []
    for calls, tokens in ((6, 5), (12, 49), (9, 20)):
        answers = " ".join(["True"] * calls)
        expected += [answers, answers, "5 5", str(tokens)]
    assert output.splitlines() == expected, errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_end_of_a_forked_process_leaves_its_parents_artifact(tiny_checkpoint: Path) -> None:
    script = """
path = model.artifact.path
if not os.fork():
    sys.exit()
os.wait()
print(path.is_dir(), flush=True)
del model
print(path.is_dir())
"""
    code, output, errors = ended(tiny_checkpoint, script, "export")
    assert (code, output.split()) == (0, ["True", "False"]), errors
