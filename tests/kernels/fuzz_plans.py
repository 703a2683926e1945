# SPDX-License-Identifier: Apache-2.0
"""Hostile changes of plans of real graphs, run by kernels that AddressSanitizer watches: refused in a sentence, or run in their memory.

test_plan_safety.py runs it, for as long as FUZZ_SECONDS says. It prints how many changes were refused, ran, or refused an index while they
ran; it fails on any other error, and ends with a crash or a report, behind the change that led to it. `--tries 1 --models NAME --seed N`
repeats one in a folder of artifacts. g++ has to have its sanitizer (libasan).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import CHUNK_SIZE, export_tiny, random_tokens, step_inputs  # noqa: E402
from recurrent import model  # noqa: E402
from tampering import read_json, write  # noqa: E402
from tiny import TINY_CONFIGS  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from optimum_neuron.arrays import to_numpy  # noqa: E402
from optimum_neuron.artifact import weights  # noqa: E402
from optimum_neuron.artifact.artifact import Artifact  # noqa: E402
from optimum_neuron.kernels import plan as plan_module  # noqa: E402
from optimum_neuron.kernels.host import native_build  # noqa: E402
from optimum_neuron.kernels.host.instruction_sets import InstructionSet, choose_instruction_set  # noqa: E402
from optimum_neuron.kernels.run import memory  # noqa: E402
from optimum_neuron.kernels.steps.access import ALL_SIZES  # noqa: E402
from optimum_neuron.targets.cpu import loader  # noqa: E402
from optimum_neuron.targets.cpu.native_library import fetch_library, load_kernels  # noqa: E402


Plan = dict[str, Any]
_DTYPES = tuple(ALL_SIZES)
_KINDS = ("input", "output", "tensor", "constant", "kept", "arena")
_WRONG: tuple[Any, ...] = (
    None, True, "", "x", -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 10**30, 1.5, [], {}, [1], [[]], {"tensor": None}, {"dtype": "x"},
    {"number": []}, "inf", "nan",
)  # fmt: skip


def mutated(plan: Plan, seed: int) -> tuple[Plan, list[str]]:
    """A copy of a plan with one to three changes, and their kinds; the same for the same seed."""
    choice, changed = random.Random(seed), copy.deepcopy(plan)
    changes = choice.choices(_CHANGES, k=choice.choice((1, 1, 1, 2, 2, 3)))
    for change in changes:
        with contextlib.suppress(
            TypeError, KeyError, IndexError, AttributeError, ValueError
        ):  # an earlier change left nothing
            change(changed, choice)
    return changed, [change.__name__.lstrip("_") for change in changes]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _is_operand(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"buffer", "dtype", "offset", "shape", "strides"}


def _operands(value: Any) -> list[Plan]:
    return [inner for holder, key in _places(value) if _is_operand(inner := holder[key])]


def _step(plan: Plan, choice: random.Random) -> Plan:
    """A step, of each kind as often as of any other."""
    kinds: dict[str, list[Plan]] = {}
    for step in (*plan["once"], *plan["steps"]):
        if isinstance(step, dict) and step:
            kinds.setdefault(str(step.get("kind")), []).append(step)
    return choice.choice(kinds[choice.choice(sorted(kinds))]) if kinds else plan


def _value(own: Any, plan: Plan, choice: random.Random) -> Any:
    if isinstance(own, int) and not isinstance(own, bool) and choice.random() < 0.7:
        near = (own + 1, own - 1, own * 2, own // 2, -own, own + 64, own * 64, len(plan["buffers"]) - 1)
        return choice.choice(near)
    if isinstance(own, str) and choice.random() < 0.7:
        return choice.choice((*_DTYPES, *_KINDS))
    return copy.deepcopy(choice.choice(_WRONG))


def _field(plan: Plan, choice: random.Random) -> None:
    """One field of a step, or none in its place."""
    holder, key = choice.choice(list(_places(_step(plan, choice))))
    if choice.random() < 0.25:
        del holder[key]
    else:
        holder[key] = _value(holder[key], plan, choice)


def _pair(plan: Plan, choice: random.Random) -> None:
    """An operand where another one of its step lies, at a place that is not far from it."""
    moved, onto = choice.sample(_operands(_step(plan, choice)), 2)
    moved["buffer"] = onto["buffer"]
    if choice.random() < 0.7:
        moved["offset"] = choice.choice((0, 1, 4, 64, onto["offset"]))


def _exchange(plan: Plan, choice: random.Random) -> None:
    """Two operands of one step, or one of any other step."""
    step = _step(plan, choice)
    others = _operands(step) if choice.random() < 0.5 else _operands(_step(plan, choice))
    left, right = choice.choice(_operands(step)), choice.choice(others)
    before, other = dict(left), dict(right)
    left.update(other)
    if choice.random() < 0.5:
        right.update(before)


def _together(plan: Plan, choice: random.Random) -> None:
    """A number of a step, wherever it has it."""
    step = _step(plan, choice)
    found = [(holder, key) for holder, key in _places(step) if type(holder[key]) is int]
    holder, key = choice.choice(found)
    own = holder[key]
    to = choice.choice((0, 1, own + 1, own * 2, own * 1000, 2**31, 2**40, 2**62))
    for inner, name in found:
        if inner[name] == own:
            inner[name] = to
    if choice.random() < 0.5:  # a size of any number of elements that takes no memory
        for operand in _operands(step):
            for dim, size in enumerate(operand["shape"][: len(operand["strides"])]):
                operand["strides"][dim] = 0 if size == to else operand["strides"][dim]


def _buffer(plan: Plan, choice: random.Random) -> None:
    """A field of a buffer, or the place of another one in memory."""
    buffer, other = choice.choice(plan["buffers"]), choice.choice(plan["buffers"])
    if choice.random() < 0.3:
        buffer["offset"] = other["offset"] + choice.choice((0, 0, 64))
    elif choice.random() < 0.5:
        buffer.update({key: other[key] for key in ("kind", "name", "offset")})
    else:
        key = choice.choice(sorted(buffer))
        buffer[key] = choice.choice(_KINDS) if key == "kind" else _value(buffer[key], plan, choice)


def _top(plan: Plan, choice: random.Random) -> None:
    key = choice.choice(sorted(plan))
    if key == "arena":
        plan[key] = _value(plan[key], plan, choice)
    else:
        plan[key] = choice.choice(([], {}, None, plan[key][::-1], plan[key] * 2))


def _order(plan: Plan, choice: random.Random) -> None:
    """Steps in another order, one more or fewer of them, or computed once that belong to each run."""
    steps = plan["steps"]
    first, second = sorted(choice.sample(range(len(steps)), 2))
    kind = choice.choice(("swap", "swap", "move", "drop", "repeat", "once"))
    if kind == "swap":
        second = first + 1 if choice.random() < 0.5 else second
        steps[first], steps[second] = steps[second], steps[first]
    elif kind == "repeat":
        steps.insert(second, copy.deepcopy(steps[first]))
    else:
        step = steps.pop(second)
        {"move": steps, "once": plan["once"], "drop": []}[kind].insert(0, step)


_CHANGES: tuple[Callable[[Plan, random.Random], None], ...] = (
    _field, _field, _field, _field, _pair, _pair, _pair, _exchange, _exchange, _together, _together, _buffer, _buffer, _top,
    _order, _order, _order, _buffer,
)  # fmt: skip


HANG = 60  # seconds of one change
_MEMORY = 1 << 30  # what a plan may take: what is larger is refused before it is allocated
_ASAN_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address")
ASAN_OPTIONS = "detect_leaks=0:abort_on_error=0:exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=4096"
REFUSED, RAN, REFUSED_RUN = "refused", "ran", "refused while running"


# A name: the architecture or the kind of recurrence of its checkpoint, and the options of its export.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "gpt_oss", "deepseek_v3", "lfm2", "gated delta", "selective")},
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "codes in the cache": ("llama", {"kv_cache_dtype": "int8"}),
    "int8": ("llama", {"quantization": "int8", "activations": "int8"}),
    "int4": ("llama", {"quantization": "int4"}),
}


def sanitized(chosen: InstructionSet) -> InstructionSet:
    return dataclasses.replace(chosen, name=f"{chosen.name}_asan", flags=(*chosen.flags, *_ASAN_FLAGS))


def sanitizer() -> str | None:
    """The libraries that have to be in a process before all others; None where the compiler has no sanitizer.

    libstdc++ among them: the sanitizer looks once for how exceptions are thrown.
    """
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [native_build.find_compiler() or "g++", f"-print-file-name={name}"]
        paths.append(Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()))
    return " ".join(str(each.resolve()) for each in paths) if all(each.is_absolute() for each in paths) else None


def make_artifacts(folder: Path, names: list[str]) -> None:
    for name in names:
        kind, options = MODELS[name]
        torch.manual_seed(1)
        tiny = TINY_CONFIGS.get(kind)
        made = AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32) if tiny else model(kind)
        made.save_pretrained(folder / "checkpoints" / name)
        export_tiny(folder / "checkpoints" / name, folder / name, target="cpu", **options)


class Fuzzer:
    """Tries changes of one artifact's plans."""

    def __init__(self, artifact: Path) -> None:
        self._path = artifact
        self._plans = {path: read_json(path) for path in sorted((artifact / "graphs").glob("*.json"))}
        self._manifest = (artifact / "neuron_config.json").read_bytes()
        for path, content in self._plans.items():
            unchanged = self._load_and_run(path, content)
            assert unchanged["verdict"] == RAN, unchanged

    def attempt(self, seed: int) -> dict[str, Any]:
        """What becomes of a change; `verdict` is one of REFUSED, RAN and REFUSED_RUN, or says what is wrong."""
        path = list(self._plans)[seed % len(self._plans)]
        plan, changes = mutated(self._plans[path]["plan"], seed)
        about = {"model": self._path.name, "seed": seed, "changes": changes}
        sys.stderr.write(f"{about}\n")  # the last line where a change ends the process
        for other, original in self._plans.items():
            other.write_text(plan_module._serialize(original), encoding="utf-8")
        (self._path / "neuron_config.json").write_bytes(self._manifest)
        signal.alarm(HANG)
        return self._load_and_run(path, self._plans[path] | {"plan": plan}) | about

    def _load_and_run(self, path: Path, content: dict[str, Any]) -> dict[str, str]:
        data = plan_module._serialize(content | {"sha256": plan_module._digest(content)}).encode()
        write(self._path, f"graphs/{path.name}", data)
        try:
            artifact = Artifact.open(self._path)
            executable = loader.load_executable(artifact, trusted=True, trust_remote_code=False)
        except BaseException as error:
            one = type(error).__name__ == "ArtifactError" and "\n" not in str(error)
            return {"verdict": REFUSED if one else f"no sentence: {type(error).__name__}", "message": str(error)}
        spec = next(each for each in artifact.graphs if each.name == path.stem)
        try:
            for start in (0, CHUNK_SIZE):
                chunks = (
                    {row: (start, random_tokens(CHUNK_SIZE)) for row in range(spec.ctx_batch_size)}
                    if spec.has_chunk
                    else {}
                )
                decode = {2: (start, 5)} if spec.has_decode else {}
                inputs = [to_numpy(each) for each in step_inputs(spec, decode, chunks)]
                executable.run(spec.name, inputs)
                executable.run_for_states(spec.name, inputs)
        except RuntimeError as error:
            return {"verdict": REFUSED_RUN, "message": str(error)}
        except BaseException as error:
            return {"verdict": f"failed: {type(error).__name__}", "message": str(error)}
        return {"verdict": RAN, "message": ""}


@contextlib.contextmanager
def _in_own_memory() -> Iterator[None]:
    """Weights and states each in memory of their own, at whose ends the sanitizer looks; and little of it."""

    def own(read: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
        return lambda argument: {name: each.copy() for name, each in read(argument).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "read_weights", own(loader.read_weights))
        patch.setattr(loader, "allocate_states", own(loader.allocate_states))
        patch.setattr(weights, "_machine_memory", lambda: _MEMORY)
        patch.setattr(memory, "machine_memory", lambda: _MEMORY)
        yield


def fuzz(folder: Path, options: argparse.Namespace) -> int:
    """Try changes of each model in turn until both the time and as many tries have passed; return the number of failures."""
    counts: Counter[str] = Counter()
    failed, seed, begin = 0, options.seed, time.monotonic()
    with _in_own_memory():
        fuzzers = [Fuzzer(folder / name) for name in options.models.split(",")]
        while counts.total() < options.tries or time.monotonic() - begin < options.seconds:
            for found in [fuzzer.attempt(seed) for fuzzer in fuzzers]:
                counts.update([found["verdict"]])
                if found["verdict"] not in (REFUSED, RAN, REFUSED_RUN):
                    failed += 1
                    sys.stdout.write(json.dumps(found) + "\n")
            seed += 1
    sys.stdout.write(
        json.dumps({"seconds": round(time.monotonic() - begin), "tried": counts.total(), **counts}) + "\n"
    )
    return failed


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Fuzz the artifacts in a folder in a process of its own; `arguments` as of `main`."""
    environment = dict(os.environ)
    if "--plain" not in arguments:
        fetch_library(
            folder / "kernels.so", sanitized(choose_instruction_set())
        )  # before the sanitizer watches the compiler
        environment |= {"LD_PRELOAD": sanitizer() or "", "ASAN_OPTIONS": ASAN_OPTIONS}
    command = [sys.executable, __file__, *arguments, "--folder", str(folder)]
    return subprocess.run(command, env=environment, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, kind in (("--seconds", float), ("--tries", int), ("--seed", int)):
        parser.add_argument(name, type=kind, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plain", action="store_true", help="without the sanitizer")
    parser.add_argument("--folder", type=Path, required=True, help="of artifacts that were made before")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not options.plain:
        native_build.choose_instruction_set = lambda: sanitized(choose_instruction_set())  # type: ignore[assignment]
    load_kernels()
    return 1 if fuzz(options.folder, options) else 0


if __name__ == "__main__":
    sys.exit(main())
