# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs of several ranks run together, each on a CPU device of XLA's own, and give the tokens of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import python_process


RANKS = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import sharded_programs
ranks = int(sys.argv[2])
sharded_programs.check(Path(sys.argv[1]), ranks)
print("equal", flush=True)
os._exit(0)  # XLA's threads of several devices do not always end
"""


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", 4),
        ("gpt_oss", 2),
        pytest.param("llama", 2, marks=pytest.mark.full),
        pytest.param("gpt_oss", 4, marks=pytest.mark.full),
    ],
)
def test_ranks_that_run_one_program_give_the_tokens_of_one_rank(
    name: str, ranks: int, sharp_checkpoints: dict[str, Path]
) -> None:
    tests = Path(__file__).parents[3]
    process = python_process(
        RANKS,
        sharp_checkpoints[name],
        str(ranks),
        tests,
        tests / "targets" / "neuron",
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(ranks),
    )
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and output.splitlines()[-1:] == ["equal"], errors[-3000:]
