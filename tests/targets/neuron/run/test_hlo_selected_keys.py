# SPDX-License-Identifier: Apache-2.0
"""Layers that select keys, in blocks, in pools behind a recurrence, or compressed: linted, certified, with the eager target's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressing
import pytest
from helpers import artifact_runner, eager_runner, export_tiny, generate, load_model, random_tokens, tiny_config
from neuron_fixtures import certificate_of
from selecting import make_checkpoint

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.config import HLO_TARGETS
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.lint.lint import lint


KINDS = ("deepseek_v4", "minimax_m3_vl_text", "qwen4_exp_text")
PROMPT = random_tokens(27, seed=2)
# Of DeepSeek-V4: a weight that its code takes as a matrix of each group.
BY_GROUP = "self_attn.o_a_proj.weight is transposed"

pytestmark = [pytest.mark.full, pytest.mark.slow]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    """By model type, with a certificate and graphs of two kinds."""
    made: dict[str, Artifact] = {}

    def export(kind: str) -> Artifact:
        if kind not in made:
            folder = tmp_path_factory.mktemp("selected") / kind
            if kind == "deepseek_v4":
                compressing.reference().save_pretrained(folder / "checkpoint")
            else:
                make_checkpoint(kind, folder / "checkpoint")
            options: dict[str, Any] = {"target": "hlo", "mixed_step": False, "certificate": True}
            made[kind] = Artifact.open(export_tiny(folder / "checkpoint", folder / "out", **options))
        return made[kind]

    return export


@kinds
def test_graphs_are_what_compilers_take(kind: str, artifact: Callable[[str], Artifact]) -> None:
    made = artifact(kind)
    for graph in made.graphs:
        path = made.graph_file(f"{graph.name}.hlo")
        for target in HLO_TARGETS:
            found = [str(each) for each in lint(graph.name, path.read_bytes(), read_graph_io(path), target)]
            assert [each for each in found if BY_GROUP not in each] == []


@kinds
def test_a_certificate_tells_of_all_that_slots_keep(kind: str, artifact: Callable[[str], Artifact]) -> None:
    made = artifact(kind)
    found = {each.subject for each in certificate_of(made.path).comparisons}
    kept = {each.name.removeprefix("kv_cache.").split("_")[0] for each in state_specs(made.config, made.model)}
    assert {"deepseek_v4": {"buffer", "group"}, "qwen4_exp_text": {"index", "state"}}.get(kind, {"index"}) < kept
    assert {f"states: {name}" for name in kept} <= found


@kinds
def test_tokens_are_those_of_the_eager_target(kind: str, artifact: Callable[[str], Artifact]) -> None:
    folder: Path = artifact(kind).path
    eager = eager_runner(load_model(folder.parent / "checkpoint"), tiny_config(mixed_step=False))
    expected, logits = generate(eager, PROMPT, 8)
    found, found_logits = generate(artifact_runner(folder), PROMPT, 8)
    assert found == expected
    assert (logits - found_logits).abs().max() < 2e-5 * logits.abs().max()
