# SPDX-License-Identifier: Apache-2.0
"""A changed artifact with graphs in HLO is refused in a sentence or gives its tokens."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import artifact_runner
from tampered import failures
from tampering import read_json, write

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.targets.neuron.lint.lint import artifact_graphs


STEP = "graphs/token_generation_context64"


@pytest.fixture
def artifact(hlo_artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(hlo_artifact("llama"), tmp_path / "artifact"))


@pytest.mark.parametrize("keep", [0, 1000])
def test_a_file_that_holds_no_graph_is_named(keep: int, artifact: Path) -> None:
    """Whoever changed it gave its digest everywhere."""
    data = (artifact / f"{STEP}.hlo").read_bytes()[:keep]
    description = read_json(artifact / f"{STEP}.json") | {"hlo_sha256": hashlib.sha256(data).hexdigest()}
    write(artifact, f"{STEP}.hlo", data)
    write(artifact, f"{STEP}.json", json.dumps(description).encode())
    message = r"token_generation_context64\.hlo holds no graph: these [\d,]+ bytes are no HLO module: .*; export the"
    with pytest.raises(ArtifactError, match=message):
        artifact_runner(artifact)
    with pytest.raises(ArtifactError, match=message):
        list(artifact_graphs(Artifact.open(artifact)))


@pytest.mark.slow
def test_a_changed_artifact_is_refused_or_gives_its_tokens(hlo_artifact: Callable[[str], Path]) -> None:
    assert failures(hlo_artifact("llama"), 60) == []


def test_a_description_of_another_graph_or_other_parameters_is_refused(artifact: Path) -> None:
    description, own = read_json(artifact / f"{STEP}.json"), (artifact / f"{STEP}.hlo").read_bytes()
    write(artifact, f"{STEP}.hlo", (artifact / "graphs/mixed_chunk8_context64.hlo").read_bytes())
    with pytest.raises(ArtifactError, match=r"token_generation_context64\.json describes another graph than token"):
        artifact_runner(artifact)
    write(artifact, f"{STEP}.hlo", own)
    weight = next(each for each in description["inputs"] if each["name"].endswith("input_layernorm.weight"))
    description["inputs"].remove(weight)
    write(artifact, f"{STEP}.json", json.dumps(description).encode())
    with pytest.raises(ValueError, match=r"token_generation_context64\.hlo has other parameters or results than its"):
        artifact_runner(artifact)
