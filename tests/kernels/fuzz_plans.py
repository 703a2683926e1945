# SPDX-License-Identifier: Apache-2.0
"""Changed plans of real graphs, loaded and run by kernels that AddressSanitizer watches: refused in a sentence, or run in their memory.

`python tests/kernels/fuzz_plans.py --seconds 3600` tries changes for an hour and prints how many were refused, ran, or refused an
index while they ran, every two minutes and at the end; it fails on a crash, a report, and any other error. `--seed` names the first
change, so that `--tries 1 --models NAME --seed N` repeats one. `--plain` leaves the sanitizer out.

Changes run in processes that are forked after all imports, so that a crash is seen as one. g++ has to have its sanitizer (libasan).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
from plan_fuzzing import ASAN_OPTIONS, MODELS, fuzz, make_artifacts, sanitized, sanitizer, say  # noqa: E402

from optimum_neuron.kernels.host import library  # noqa: E402
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set  # noqa: E402
from optimum_neuron.targets.cpu.native_library import fetch_library, load_kernels  # noqa: E402


def _work(options: argparse.Namespace) -> int:
    """In the process that has the sanitizer, if it is asked for."""
    torch.set_num_threads(1)  # a process that computes with several cannot be forked
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not options.plain:
        library.choose_instruction_set = lambda: sanitized(choose_instruction_set())  # type: ignore[assignment]
    load_kernels()
    begin = time.monotonic()
    counts, failures = fuzz(options.folder, options.models, options.seed, options.seconds, options.tries)
    say({"seconds": round(time.monotonic() - begin), "tried": counts.total(), **counts, "failures": len(failures)})
    return 1 if failures else 0


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Fuzzes the artifacts in a folder in a process of its own; `arguments` as of the script."""
    environment = dict(os.environ)
    if "--plain" not in arguments:
        fetch_library(folder, sanitized(choose_instruction_set()))  # built before, where the compiler is not watched
        environment |= {"LD_PRELOAD": sanitizer() or "", "ASAN_OPTIONS": ASAN_OPTIONS}
    command = [sys.executable, __file__, *arguments, "--folder", str(folder)]
    return subprocess.run(command, env=environment, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", type=lambda text: re.split(r",\s*", text), default=list(MODELS))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path, help="of artifacts that were made before")
    options = parser.parse_args()
    if options.folder is not None:
        return _work(options)
    with tempfile.TemporaryDirectory() as scratch:
        make_artifacts(Path(scratch), options.models)
        return run(sys.argv[1:], Path(scratch)).returncode


if __name__ == "__main__":
    sys.exit(main())
