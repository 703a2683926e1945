# SPDX-License-Identifier: Apache-2.0
"""Changed plans of real graphs, loaded and run by kernels that AddressSanitizer watches: refused in a sentence, or run in their memory.

test_plan_safety.py runs it, for as long as FUZZ_SECONDS says. It prints how many changes were refused, ran, or refused an index while they
ran; it fails on a crash, a report, and any other error. `--tries 1 --models NAME --seed N` repeats one in a folder of artifacts.

Changes run in processes that are forked after all imports, so that a crash is seen as one. g++ has to have its sanitizer (libasan).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
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
from plan_mutations import mutated  # noqa: E402
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
from optimum_neuron.targets.cpu import loader  # noqa: E402
from optimum_neuron.targets.cpu.native_library import fetch_library, load_kernels  # noqa: E402


HANG = 60  # seconds of one change
BATCH = 25  # changes of a process, unless one ends it
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


def fuzz(folder: Path, options: argparse.Namespace) -> int:
    """Try changes of each model in turn until both the time and as many tries have passed; return the number of failures."""
    counts: Counter[str] = Counter()
    failed, seed, begin = 0, options.seed, time.monotonic()
    with _in_own_memory():
        fuzzers = [Fuzzer(folder / name) for name in options.models.split(",")]
        while counts.total() < options.tries or time.monotonic() - begin < options.seconds:
            end = seed + (BATCH if options.seconds else min(BATCH, options.tries))
            for fuzzer in fuzzers:
                next_seed = seed
                while next_seed < end:
                    outcomes = fuzzer.attempt(range(next_seed, end))
                    next_seed += len(outcomes)
                    counts.update(each["verdict"] for each in outcomes)
                    for each in outcomes:
                        if each["verdict"] not in (REFUSED, RAN, REFUSED_RUN):
                            failed += 1
                            say(each)
            seed = end
    say({"seconds": round(time.monotonic() - begin), "tried": counts.total(), **counts})
    return failed


def say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


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
    torch.set_num_threads(1)  # a process that computes with several cannot be forked
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not options.plain:
        native_build.choose_instruction_set = lambda: sanitized(choose_instruction_set())  # type: ignore[assignment]
    load_kernels()
    return 1 if fuzz(options.folder, options) else 0


if __name__ == "__main__":
    sys.exit(main())
