# SPDX-License-Identifier: Apache-2.0
"""The certificate of an artifact that is being exported: its graphs are linted, executed and compared with the eager step."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ... import progress
from ...artifact.artifact import GRAPHS_FOLDER
from ...artifact.filesystem import file_sha256
from ...artifact.skeleton import assign, empty_model
from ...artifact.weights import named_tensors
from ...step.spec import LOGPROBS
from ...targets import CompileJob
from ...targets.neuron.graphs.io import HLO_SUFFIX, read_graph_io, read_hlo
from ...targets.neuron.lint.lint import RULES_VERSION, Finding, lint, passed_rules
from ...version import __version__
from . import CERTIFICATE_NAME
from .comparison import Comparison, Expected, compare, expect_results
from .reference import run_reference, state_scales
from .setup import Setup, choose_trial, make_setup, to_float32


def make_certificate(model: PreTrainedModel, job: CompileJob) -> None:
    """Execute the graphs of a folder that becomes an artifact; write its certificate.json, and raise as `certify_export` does."""
    findings: list[Finding] = []
    for path in hlo_files(job.folder):
        findings += lint(path.stem, read_hlo(path), read_graph_io(path), job.config.target)
    with tempfile.TemporaryDirectory() as scratch:
        trial, trusted = choose_trial(job, Path(scratch)), job.trust_remote_code
        setup = make_setup(job.folder, trial, job.model, job.tied_weights, trust_remote_code=trusted)
        comparisons = _compare_types(model, setup, trust_remote_code=trusted)
    different = next((each for each in comparisons if not each.holds), None)
    if different is not None:
        raise ValueError(
            f"the lowered graphs do not compute what the model does: {different}; use target='cpu', and report the model"
        )
    versions = {"optimum_neuron": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("torch-xla", "neuronx-cc"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    layers = {"layers": trial.layers, "all_layers": trial.all_layers}
    found = {
        "version": 2,
        "rules": {"version": RULES_VERSION, "passed": passed_rules(findings)},
        "graphs": {path.stem: file_sha256(path) for path in hlo_files(job.folder)},
        "executed": {**layers, "config": trial.config.to_dict()},
        "steps": {"count": len(setup.steps), "tokens": sum(len(step.written) for step in setup.steps)},
        "comparisons": [asdict(each) for each in comparisons],
        "versions": versions,
    }
    document = json.dumps(found, allow_nan=False, sort_keys=True)
    (job.folder / CERTIFICATE_NAME).write_text(document + "\n", encoding="utf-8")


def _compare_types(model: nn.Module, setup: Setup, *, trust_remote_code: bool) -> list[Comparison]:
    scales: dict[str, int] = {}
    comparisons = list[Comparison]()
    dtypes = dict.fromkeys(("float32", setup.trial.config.dtype))
    with progress.stage("Comparing steps", 2 * len(dtypes)) as advance:
        for dtype in dtypes:
            scales, expected = expect_type(model, setup, dtype, scales, trust_remote_code=trust_remote_code)
            advance(f"the model in {dtype}")
            comparisons += compare(expected, setup.execute_steps(dtype, scales))
            advance(f"the graphs in {dtype}")
    return comparisons


def expect_type(
    model: nn.Module, setup: Setup, dtype: str, scales: dict[str, int], *, trust_remote_code: bool
) -> tuple[dict[str, int], Expected]:
    """Run the eager step in a type; return its results and the power of two of each state's history.

    Its own model is gone before XLA gets weights. Empty scales are measured; others are those of another type.
    """
    reference, own = model, setup.trial.config.dtype
    if not setup.trial.is_whole or dtype != own:
        reference = empty_model(setup.trial.folder, dtype, trust_remote_code=trust_remote_code)
        tensors = named_tensors(model)
        taken = {name: tensors[name] for name in named_tensors(reference)}
        assign(reference, {name: each if dtype == own else to_float32(each) for name, each in taken.items()})
    states = setup.state_specs(dtype)
    scales = scales or state_scales(reference, states, setup.graphs, setup.spec, setup.steps)
    plain, moved = (
        run_reference(reference, states, setup.graphs, setup.spec, setup.steps, scales, shake=shake)
        for shake in (False, True)
    )
    count = setup.trial.config.top_logprobs if LOGPROBS in setup.modules else None
    return scales, expect_results(plain, moved, setup.steps, dtype, setup.ranks, setup.parts, count)


def hlo_files(folder: Path) -> list[Path]:
    return sorted((folder / GRAPHS_FOLDER).glob("*" + HLO_SUFFIX))
