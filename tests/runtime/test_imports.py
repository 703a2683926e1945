# SPDX-License-Identifier: Apache-2.0
"""Running an artifact needs no torch: its import takes seconds, and some hundred megabytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import Opener, generate, python_process


# Ends with the file and line that imports what is not to be imported.
WATCH = """
import json, sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            callers = [each for each in traceback.extract_stack()[:-1] if "importlib" not in each.filename]
            sys.exit(f"{name} is imported by {callers[-1].filename}:{callers[-1].lineno}")

sys.meta_path.insert(0, Watch())
"""
RUN = """
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.runtime.timing import load_runner
from optimum_neuron.step.spec import SamplingParams

artifact = Artifact.open(sys.argv[1])
engine = Engine(load_runner(artifact, trust_native_code=True), vocab_size=artifact.model.vocab_size, seed=0)
engine.runner.warm_up()
for name, sampling in (("greedy", SamplingParams()), ("drawn", SamplingParams(5, 0.9, 0.8))):
    prompt = json.loads(sys.argv[2])
    engine.add_request(Request(request_id=name, prompt_token_ids=prompt, max_new_tokens=5, sampling=sampling))
tokens = {"greedy": [], "drawn": []}
for event in engine.run_requests():
    tokens[event.request_id].append(event.token_id)
print(json.dumps(tokens))
"""


@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_a_request_runs_to_its_end_without_torch(
    cpu_artifact: Callable[[str], Path], open_runner: Opener, model: str
) -> None:
    prompt = np.arange(3, 24, dtype=np.int32)
    output, errors = python_process(WATCH + RUN, cpu_artifact(model), json.dumps(prompt.tolist())).communicate(
        timeout=100
    )
    assert output, errors
    tokens = json.loads(output)
    assert tokens["greedy"] == generate(open_runner(model), prompt, 5)[0] and len(tokens["drawn"]) == 5


# Of each module, the packages of others that it may import, and the most modules in all. numpy has 160.
BUDGETS = {
    "optimum_neuron": ((), 10),
    "optimum_neuron.generate.text_model": (("jinja2", "markupsafe", "ml_dtypes", "numpy", "tokenizers"), 350),
    "optimum_neuron.tools.chat.session": (("numpy",), 300),
    "optimum_neuron.targets.cpu.loader": (("huggingface_hub", "ml_dtypes", "numpy"), 350),
}
COUNT = """
there = {*sys.modules}
importlib.import_module(sys.argv[1])
new = {*sys.modules} - there
others = {name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"optimum_neuron"}
print(json.dumps([sorted(others), len(new)]))
"""


@pytest.mark.parametrize("module", BUDGETS)
def test_what_runs_imports_few_packages_and_modules(module: str) -> None:
    output, errors = python_process(f"import importlib\n{WATCH}{COUNT}", module).communicate(timeout=60)
    assert output, errors
    (allowed, most), (others, count) = BUDGETS[module], json.loads(output)
    assert {*others} <= {*allowed} and count <= most, (others, count)


def test_the_server_is_imported_without_torch() -> None:
    output, errors = python_process(f"{WATCH}import optimum_neuron.tools.serve.server\nprint('done')").communicate(
        timeout=60
    )
    assert output == "done\n", errors
