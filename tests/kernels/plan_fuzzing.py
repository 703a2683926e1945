# SPDX-License-Identifier: Apache-2.0
"""Changed plans of real graphs, loaded and run: each is refused in a sentence, or runs in its memory. See fuzz_plans.py."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CHUNK_SIZE, export_tiny, random_tokens, step_inputs
from plan_mutations import mutated
from recurrent import model
from tampering import read_json, write
from tiny import TINY_CONFIGS
from transformers import AutoModelForCausalLM

from optimum_neuron.arrays import to_numpy
from optimum_neuron.artifact import weights
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.kernels import plan as plan_module
from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.host.instruction_sets import InstructionSet
from optimum_neuron.kernels.run import memory
from optimum_neuron.targets.cpu import loader


HANG = 60  # seconds of one change
BATCH = 25  # changes of a process, unless one ends it
_MEMORY = 1 << 30  # what a plan may take: what is larger is refused before it is allocated
_REPORT_SECONDS = 120
_ASAN_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address")
ASAN_OPTIONS = "detect_leaks=0:abort_on_error=0:exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=4096"
REFUSED, RAN, REFUSED_RUN = "refused", "ran", "refused while running"


def _tiny(name: str, folder: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(TINY_CONFIGS[name](), dtype=torch.float32).save_pretrained(folder)
    return folder


def _recurrent(kind: str, folder: Path) -> Path:
    model(kind).save_pretrained(folder)
    return folder


# A name: how its checkpoint is made, and the options of its export.
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "llama": (lambda folder: _tiny("llama", folder), {}),
    "bfloat16": (lambda folder: _tiny("llama", folder), {"dtype": "bfloat16"}),
    "codes in the cache": (lambda folder: _tiny("llama", folder), {"kv_cache_dtype": "int8"}),
    "gpt_oss": (lambda folder: _tiny("gpt_oss", folder), {}),
    "deepseek_v3": (lambda folder: _tiny("deepseek_v3", folder), {}),
    "lfm2": (lambda folder: _tiny("lfm2", folder), {}),
    "gated delta": (lambda folder: _recurrent("gated delta", folder), {}),
    "selective": (lambda folder: _recurrent("selective", folder), {}),
    "int8": (lambda folder: _tiny("llama", folder), {"quantization": "int8", "activations": "int8"}),
    "int4": (lambda folder: _tiny("llama", folder), {"quantization": "int4"}),
}


def sanitized(chosen: InstructionSet) -> InstructionSet:
    """The same instructions, watched by AddressSanitizer."""
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
    """Exports each model to a folder of its name."""
    for name in names:
        make, options = MODELS[name]
        export_tiny(make(folder / "checkpoints" / name), folder / name, target="cpu", **options)


class Fuzzer:
    """Tries changes of one artifact's plans."""

    def __init__(self, artifact: Path) -> None:
        self._path = artifact
        self._plans = {path: read_json(path) for path in sorted((artifact / "graphs").glob("*.json"))}
        self._manifest = (artifact / "neuron_config.json").read_bytes()
        for path, content in self._plans.items():  # before the forks, which find all imported
            unchanged = self._load_and_run(path, content)
            assert unchanged["verdict"] == RAN, unchanged

    def attempt(self, seeds: range) -> list[dict[str, Any]]:
        """What becomes of changes, up to the first that ends their process.

        `verdict` is one of REFUSED, RAN and REFUSED_RUN, or says what is wrong.
        """
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as result:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 2)
                with contextlib.suppress(BaseException):
                    for seed in seeds:
                        signal.alarm(HANG)
                        result.write(json.dumps(self._try(seed)) + "\n")
                        result.flush()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            result.seek(0)
            found = [json.loads(line) for line in result]
            if len(found) < len(seeds):
                code = os.waitstatus_to_exitcode(status)
                verdict = "hung" if code == -signal.SIGALRM else f"ended with {code}"
                found.append({"verdict": verdict, "message": said.read()[:6000]})
        for seed, each in zip(seeds, found, strict=False):
            each |= {"model": self._path.name, "seed": seed, "changes": self._changed(seed)[2]}
        return found

    def _changed(self, seed: int) -> tuple[Path, dict[str, Any], list[str]]:
        """The file of a plan, its changed contents, and what was changed."""
        path = list(self._plans)[seed % len(self._plans)]
        plan, changes = mutated(self._plans[path]["plan"], seed)
        return path, self._plans[path] | {"plan": plan}, changes

    def _try(self, seed: int) -> dict[str, str]:
        path, content, _ = self._changed(seed)
        for other, original in self._plans.items():
            other.write_text(plan_module._serialize(original), encoding="utf-8")
        (self._path / "neuron_config.json").write_bytes(self._manifest)
        return self._load_and_run(path, content)

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


def fuzz(
    folder: Path, names: list[str], seed: int, seconds: float, tries: int
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Tries changes of each model in turn until both the time and as many tries have passed; returns counts and failures."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    begin = said = time.monotonic()
    with _in_own_memory():
        fuzzers = [Fuzzer(folder / name) for name in names]
        while counts.total() < tries or time.monotonic() - begin < seconds:
            for fuzzer in fuzzers:
                next_seed, end = seed, seed + (BATCH if seconds else min(BATCH, tries))
                while next_seed < end:
                    outcomes = fuzzer.attempt(range(next_seed, end))
                    next_seed += len(outcomes)
                    counts.update(each["verdict"] for each in outcomes)
                    failures += [each for each in outcomes if each["verdict"] not in (REFUSED, RAN, REFUSED_RUN)]
                    say(*(each for each in outcomes if each in failures))
            seed = end
            if time.monotonic() - said > _REPORT_SECONDS:
                said = time.monotonic()
                say({"seconds": round(said - begin), "tried": counts.total(), **counts})
    return counts, failures


def say(*found: dict[str, Any]) -> None:
    for each in found:
        sys.stdout.write(json.dumps(each) + "\n")
    sys.stdout.flush()
