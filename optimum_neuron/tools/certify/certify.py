# SPDX-License-Identifier: Apache-2.0
"""The certificate of an artifact that is being exported: its graphs are linted, executed and compared with the eager step."""

from __future__ import annotations

import tempfile
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
from ...targets.neuron.lint.lint import Finding, lint
from ...targets.neuron.lint.lint import passed_rules as names_of_passed_rules
from ...targets.neuron.lint.rules import RULES_VERSION
from ...version import __version__
from .comparison import Comparison, compare
from .document import Certificate
from .expected import Expected, expect_results, sample_values
from .recording import digest_steps
from .reference import run_reference, state_scales
from .setup import Setup, make_setup, record_config, to_float32
from .trial import choose_trial


def make_certificate(model: PreTrainedModel, job: CompileJob) -> Certificate:
    """Execute the graphs of a folder that becomes an artifact; raise as `certify_export` does."""
    trusted = job.trust_remote_code
    with tempfile.TemporaryDirectory() as scratch:
        steps = record_config(job.config, job.model)
        trial = choose_trial(job.folder, job.config, job.model, steps, Path(scratch), trust_remote_code=trusted)
        setup = make_setup(job.folder, trial, job.model, job.tied_weights, trust_remote_code=trusted)
        scales, expected, comparisons = _compare_types(model, setup, trust_remote_code=trusted)
    different = next((each for each in comparisons if not each.holds), None)
    if different is not None:
        raise ValueError(
            f"the lowered graphs do not compute what the model does: {different}; use target='cpu', and report the model"
        )
    return Certificate(
        rules_version=RULES_VERSION,
        rules=passed_rules(job.folder, job.config.target),
        graphs={path.stem: file_sha256(path) for path in hlo_files(job.folder)},
        layers=trial.layers,
        all_layers=trial.all_layers,
        config=trial.config,
        executed={name: module.io.hlo_sha256 for name, module in setup.modules.items()},
        steps=len(setup.steps),
        tokens=sum(len(step.written) for step in setup.steps),
        steps_sha256=digest_steps(setup.steps),
        scales=scales,
        comparisons=comparisons,
        expected=expected,
        versions=installed_versions(),
    )


def _compare_types(
    model: nn.Module, setup: Setup, *, trust_remote_code: bool
) -> tuple[dict[str, int], tuple[Expected, ...], tuple[Comparison, ...]]:
    """Execute in float32 and in the graphs' own type; return the history's scales, expected numbers, and comparisons."""
    scales: dict[str, int] = {}
    records, comparisons = [], list[Comparison]()
    dtypes = dict.fromkeys(("float32", setup.trial.config.dtype))
    with progress.stage("Comparing steps", 2 * len(dtypes)) as advance:
        for dtype in dtypes:
            scales, expected = _expect_type(model, setup, dtype, scales, trust_remote_code=trust_remote_code)
            advance(f"the model in {dtype}")
            comparisons += compare(expected, setup.execute_steps(dtype, scales))
            advance(f"the graphs in {dtype}")
            records.append(sample_values(expected, setup.steps))
    return scales, tuple(records), tuple(comparisons)


def _expect_type(
    model: nn.Module, setup: Setup, dtype: str, scales: dict[str, int], *, trust_remote_code: bool
) -> tuple[dict[str, int], Expected]:
    """Run the eager step in a type; its model is gone before XLA gets weights of its own."""
    reference = _reference_model(model, setup, dtype, trust_remote_code=trust_remote_code)
    states = setup.state_specs(dtype)
    scales = scales or state_scales(reference, states, setup.graphs, setup.spec, setup.steps)
    plain, moved = (
        run_reference(reference, states, setup.graphs, setup.spec, setup.steps, scales, shake=shake)
        for shake in (False, True)
    )
    count = setup.trial.config.top_logprobs if LOGPROBS in setup.modules else None
    return scales, expect_results(plain, moved, setup.steps, dtype, setup.ranks, setup.parts, count)


def _reference_model(model: nn.Module, setup: Setup, dtype: str, *, trust_remote_code: bool) -> nn.Module:
    own = setup.trial.config.dtype
    if setup.trial.is_whole and dtype == own:
        return model
    reference = empty_model(setup.trial.folder, dtype, trust_remote_code=trust_remote_code)
    tensors = named_tensors(model)
    taken = {name: tensors[name] if dtype == own else to_float32(tensors[name]) for name in named_tensors(reference)}
    assign(reference, taken)
    return reference


def passed_rules(folder: Path, target: str) -> tuple[str, ...]:
    """Return the lint's rules that no graph of a folder breaks."""
    findings: list[Finding] = []
    for path in hlo_files(folder):
        findings += lint(path.stem, read_hlo(path), read_graph_io(path), target)
    return names_of_passed_rules(findings)


def hlo_files(folder: Path) -> list[Path]:
    """Return the HLO modules of an artifact's folder."""
    return sorted((folder / GRAPHS_FOLDER).glob("*" + HLO_SUFFIX))


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries that lower and compute."""
    found = {"optimum_neuron": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("torch-xla", "neuronx-cc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
