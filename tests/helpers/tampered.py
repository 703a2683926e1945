# SPDX-License-Identifier: Apache-2.0
"""What becomes of changed artifacts: an error in a sentence, or the tokens of the unchanged one.

`python tests/helpers/tampered.py ARTIFACT` tries all changes of an artifact and prints what came of them, a JSON object per line.
Each is loaded and run in a process of its own, forked after all imports, so that a crash is seen as one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tampering import MANIFEST, changes


HANG = 60  # seconds
ERRORS = ("ArtifactError", "ValueError", "FileNotFoundError")
REMEDY = re.compile(r"; (.*again|remove it|give it its old name back|restore .*|put the file itself there|export .*)")


def answer(path: Path) -> list[int]:
    import torch

    from optimum_neuron import NeuronModelForCausalLM

    model = NeuronModelForCausalLM.from_pretrained(path)
    prompt = torch.arange(5, 26)[None]
    return model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 21:].tolist()


def outcome(path: Path) -> dict[str, Any]:
    """Loads and runs an artifact in a process of its own."""
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:
        signal.alarm(HANG)
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as file:
            try:
                result: dict[str, Any] = {"tokens": answer(path)}
            except BaseException as error:
                result = {"error": type(error).__name__, "message": str(error)}
            json.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text) if text and status == 0 else {"crash": os.waitstatus_to_exitcode(status)}
    return found


def verdict(found: dict[str, Any], expected: list[int], path: Path) -> str:
    """`same` tokens, `refused` in a sentence, or what is wrong."""
    if "tokens" in found:
        return "same" if found["tokens"] == expected else "other tokens"
    if "crash" in found:
        return "crash"
    message = found["message"]
    named = str(path) in message or MANIFEST in message or "config.json" in message or "the artifact" in message
    one_sentence = "\n" not in message and len(message) < 1200 and REMEDY.search(message)
    return "refused" if found["error"] in ERRORS and named and one_sentence else "no sentence"


def failures(artifact: Path, every: int) -> list[dict[str, Any]]:
    """What `main` found other than a refusal or the same tokens."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(artifact), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert outcomes
    return [found for found in outcomes if found["verdict"] not in ("same", "refused")]


def main(artifact: Path, every: int = 1) -> None:
    """Print the outcome of each `every`-th change, with its name and verdict."""
    import torch
    import transformers

    import optimum_neuron.generate.model
    import optimum_neuron.targets.eager  # noqa: F401  before the forks, which are then fast
    from optimum_neuron.targets.cpu import compiler

    def refuse(*_: object) -> None:
        raise AssertionError("a change has code compiled that the compile cache lacks")

    compiler._compile_graph = refuse
    torch.set_num_threads(1)  # a process that computes with several cannot be forked
    transformers.utils.logging.set_verbosity_error()
    expected = outcome(artifact)["tokens"]
    for change in changes(artifact)[::every]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(shutil.copytree(artifact, Path(scratch, "artifact")))
            change.apply(path)
            found = outcome(path)
            told = {"change": change.name, "verdict": verdict(found, expected, path), **found}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
