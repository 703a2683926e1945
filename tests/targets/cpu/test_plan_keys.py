# SPDX-License-Identifier: Apache-2.0
"""Keys of plans in the compile cache: the same wherever and of whichever weights, another for all that a plan depends on."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, generate, random_tokens
from quantized_files import change_config
from safetensors.torch import load_file, save_file
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig

import optimum_neuron.version
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.artifact.quantization import write_formats
from optimum_neuron.artifact.tensor_file import StoredTensor, stored_tensors
from optimum_neuron.step.features.codes.modules import WeightFormat
from optimum_neuron.targets import CompileJob
from optimum_neuron.targets.cpu import compiler
from optimum_neuron.targets.cpu import plan_keys as plan_keys_module
from optimum_neuron.targets.cpu.plan_keys import imported_sources, plan_keys


@pytest.fixture
def job(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> CompileJob:
    """That of the tiny Llama, in a folder of its own with config.json alone."""
    artifact = Artifact.open(cpu_artifact("llama"))
    shutil.copy(artifact.path / "config.json", tmp_path)
    return CompileJob(tmp_path, artifact.config, artifact.model, artifact.graphs, artifact.tied_weights, False)


@pytest.fixture
def tensors(cpu_artifact: Callable[[str], Path]) -> dict[str, StoredTensor]:
    return stored_tensors(cpu_artifact("llama") / WEIGHTS_NAME)


def test_no_folder_author_or_version_of_this_package_is_in_a_key(
    job: CompileJob, tensors: dict[str, StoredTensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = plan_keys(job, tensors)
    assert len(set(keys.values())) == len(job.graphs) and all(len(key) == 64 for key in keys.values())
    elsewhere = dataclasses.replace(job, folder=Path(shutil.copytree(tmp_path, tmp_path / "elsewhere")))
    # Whoever saved it, in whatever type, with defaults spelled out or not, in whatever order.
    change_config(
        elsewhere.folder, _name_or_path="/home/me", transformers_version="4.0.0", dtype="bfloat16", mlp_bias=False
    )
    monkeypatch.setattr(optimum_neuron.version, "__version__", "99.0")
    assert plan_keys(elsewhere, dict(reversed(tensors.items()))) == keys


CHANGES: dict[str, Callable[[CompileJob, dict[str, Any]], object]] = {
    "config": lambda job, tensors: change_config(job.folder, rms_norm_eps=1e-3),
    "type of a tensor": lambda job, tensors: tensors.update(
        {name: dataclasses.replace(each, dtype=torch.float64) for name, each in [next(iter(tensors.items()))]}
    ),
    "name of a tensor": lambda job, tensors: tensors.update(other=tensors.popitem()[1]),
    "ties": lambda job, tensors: job.tied_weights.update({"model.lm_head.weight": "model.model.embed_tokens.weight"}),
    "codes": lambda job, tensors: write_formats(
        {"lm_head": WeightFormat("int8", 1, "float32", False, None)}, job.folder
    ),
    "activations": lambda job, tensors: write_formats(
        {"lm_head": WeightFormat("int8", 1, "float32", False, "int8")}, job.folder
    ),
}


def test_what_a_plan_depends_on_makes_another_key(
    job: CompileJob, tensors: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [plan_keys(job, tensors)]
    for change in CHANGES.values():
        change(job, tensors)
        found.append(plan_keys(job, tensors))
    for module, version in (
        ("torch.__version__", "9.9"),
        ("transformers.__version__", "9.9"),
        ("sys.version_info", (9, 9)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{plan_keys_module.__name__}.{module}", version)
            found.append(plan_keys(job, tensors))
    assert len({key for keys in found for key in keys.values()}) == len(found) * len(job.graphs)


# The compiler alone, without the package around it, which imports the loader too.
LOADED = """
import importlib, sys, types
import optimum_neuron.targets as targets
package = types.ModuleType("optimum_neuron.targets.cpu")
package.__path__ = [targets.__path__[0] + "/cpu"]
sys.modules[package.__name__] = package
importlib.import_module("optimum_neuron.targets.cpu.compiler")
files = (getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("optimum_neuron."))
print(*filter(None, files), sep="\\n")
"""


def test_sources_of_plans_are_all_modules_that_the_compiler_imports() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    # The version is what the package itself imports: it is in no key.
    loaded = {path for path in map(Path, done.stdout.split()) if path.name not in ("__init__.py", "version.py")}
    assert len(loaded) > 50 and loaded <= imported_sources(Path(compiler.__file__))


def test_weights_that_are_tied_and_weights_that_are_not_have_plans_of_their_own(tmp_path: Path) -> None:
    """transformers leaves a head untied that a checkpoint has other weights for, whatever its config says."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES, tie_word_embeddings=True), dtype=torch.float32)
    for name in ("tied", "untied"):
        model.save_pretrained(tmp_path / name)
    weights = load_file(tmp_path / "untied" / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    prompt = random_tokens(9)
    for name in ("tied", "untied"):
        artifact = export_tiny(tmp_path / name, tmp_path / f"{name}-artifact", target="cpu")
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            logits = expected(torch.tensor(prompt)[None]).logits[0, -1]
        torch.testing.assert_close(generate(artifact_runner(artifact), prompt, 1)[1][0], logits, rtol=1e-4, atol=1e-4)
