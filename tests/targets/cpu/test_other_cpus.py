# SPDX-License-Identifier: Apache-2.0
"""CPUs that lack what the own kernels need: what they get, what they are told, and a machine that plays one of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers import Opener, artifact_runner, decode_tokens, export_tiny, generate, random_tokens
from torch import Tensor, nn

from optimum_neuron.artifacts.artifact import MANIFEST_NAME
from optimum_neuron.targets.cpu import host, kernels
from optimum_neuron.targets.cpu.host import CPU_VARIABLE, INSTRUCTION_SETS, host_requirements, unmet_requirement
from optimum_neuron.targets.cpu.rewrite import ROW_MULTIPLE, pad_linear_rows


AVX2 = INSTRUCTION_SETS["avx2"]


@pytest.fixture
def older_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX2, whichever this one is."""
    monkeypatch.setattr(host, "_machine_flags", lambda: set(AVX2.flags))
    monkeypatch.delenv(CPU_VARIABLE, raising=False)


@pytest.mark.usefixtures("older_cpu")
@pytest.mark.parametrize(
    ("dtype", "advice"), [("bfloat16", "--dtype float32 unless prompts are short"), ("float32", "float32 is the best")]
)
def test_a_cpu_without_the_kernels_is_told_in_one_line(
    dtype: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not kernels.are_fast_here()
    with caplog.at_level(logging.WARNING):
        kernels.advise(dtype)
    (line,) = caplog.messages
    assert line.startswith("this CPU lacks avx512_bf16, avx512bw, avx512dq, avx512f, avx512vl") and advice in line
    assert "\n" not in line


@pytest.mark.usefixtures("older_cpu")
def test_code_of_a_newer_cpu_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    newer = host_requirements() | {"isa": [*AVX2.flags, "avx512_bf16"]}
    assert unmet_requirement(newer) == "it was compiled for a CPU with avx512_bf16, which this one lacks"


@pytest.mark.usefixtures("older_cpu")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sse9", r"OPTIMUM_NEURON_CPU='sse9' is not known; choose one of avx2, avx512"),
        ("avx512", "needs avx512bw, .*lacks"),
    ],
)
def test_an_instruction_set_that_cannot_be_had_is_refused(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_VARIABLE, name)
    with pytest.raises(ValueError, match=words):
        host_requirements()


@pytest.mark.slow
def test_graphs_for_an_older_cpu_give_the_tokens_of_the_eager_target(
    open_runner: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharp_checkpoints: dict[str, Path],
) -> None:
    monkeypatch.setenv(CPU_VARIABLE, "avx2")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "artifact", target="cpu")
    data = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))["target_data"]
    assert set(data["requires"]["isa"]) == AVX2.flags and data["kernel_namespace"] is None
    assert not (path / "graphs" / "kernels.so").exists()
    runner, prompt = artifact_runner(path), random_tokens(21)
    assert generate(runner, prompt, 12)[0] == generate(open_runner("llama"), prompt, 12)[0]
    # Inside one graph a token's bits depend on no other row, on such CPUs too.
    runner.reset_all()
    together = decode_tokens(runner, {0: 7, 1: 8, 2: 7})[1]
    for slot in range(3):
        runner.reset_all()
        assert torch.equal(decode_tokens(runner, {slot: [7, 8, 7][slot]})[1][slot], together[slot])


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.down(self.up(x[:, :1]))


@pytest.mark.parametrize("rows", [1, 4, 19])
def test_linear_layers_get_rows_that_torch_computes_alike(rows: int) -> None:
    module, x = _Layers(), torch.randn(1, rows, 8)
    program = torch.export.export(module, (x,), strict=False)
    pad_linear_rows(program)
    shapes = [
        node.args[0].meta["val"].shape[-2]
        for node in program.graph_module.graph.nodes
        if node.target is torch.ops.aten.linear.default
    ]
    assert len(shapes) == 4 and all(count == 1 or count % ROW_MULTIPLE == 0 for count in shapes)
    torch.testing.assert_close(program.module()(x), module(x))
