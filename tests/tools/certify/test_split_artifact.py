# SPDX-License-Identifier: Apache-2.0
"""An artifact whose ranks split the tokens of a chunk, as its export writes it: the compiler lists its operators, and its certificate
executes all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.tools import NeuronTools
from helpers import export_tiny

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.lint import installed_operators, lint_artifact
from optimum_neuron.targets.neuron.lowering import token_regions
from optimum_neuron.tools.certify.document import Certificate


pytest_plugins = ("fakes.plugin",)
BATCH = {"batch_size": 4}  # what decode rows of a mixed graph are divides by the ranks
SUMS = 5  # of the embedding, and of attention and the MLP of each of two layers
OF_CHOICE = 2  # all-gathers of each rank's largest logit and its token, for decode rows and for chunk rows


@pytest.mark.full
def test_an_artifact_whose_ranks_split_the_tokens_of_chunks_is_certified(
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a latency at which the rule splits the tokens of a mixed graph and of chunks, and not those of decode rows."""
    neuron_sdk("trn2", "lite")
    monkeypatch.setattr(token_regions, "COLLECTIVE_S", 2e-9)
    path = export_tiny(
        sharp_checkpoints["llama"],
        tmp_path / "ranks",
        target="trn2",
        tensor_parallel_size=2,
        certificate=True,
        **BATCH,
    )
    found = {}
    for graph in Artifact.open(path).graphs:
        module = hlo.parse((path / "graphs" / f"{graph.name}.hlo").read_bytes())
        found[graph.kind] = Counter(each.opcode for _, each in hlo.instructions(module))
    assert found["token_generation"]["all-reduce"] == SUMS and not found["token_generation"]["reduce-scatter"]
    for kind, row_groups in (("chunked_prefill", 1), ("mixed", 2)):
        assert found[kind]["reduce-scatter"] == SUMS and not found[kind]["all-reduce"]
        assert found[kind]["all-gather"] == SUMS + row_groups * OF_CHOICE
    assert lint_artifact(Artifact.open(path), operators=installed_operators()) == []
    comparisons = Certificate.read(path).comparisons
    assert comparisons and all(each.holds for each in comparisons)
