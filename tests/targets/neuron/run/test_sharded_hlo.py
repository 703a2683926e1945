# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs of several ranks run together, each on a CPU device of XLA's own, and give the tokens of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import python_process
from moe import CONFIGS, make_checkpoint
from recurrent import model


RANKS = """
import json, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[5:]
import sharded_programs
getattr(sharded_programs, sys.argv[4])(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))
print("equal", flush=True)
os._exit(0)  # XLA's threads of several devices do not always end
"""
# One row of each kind: experts are gathered for a decode row, and computed in blocks for a chunk; of logits up to 5, in float32.
EXPERTS = {
    "batch_size": 1, "ctx_batch_size": 1, "sequence_length": 512, "prefill_chunk_size": 256, "context_buckets": [512], "mixed_step": False,
    "noise": 2e-5,
}  # fmt: skip
# Ranks that split tokens, which they can share evenly in a graph of each kind, and ranks that do not give the same bits.
SPLIT = {"forms": [False, True], "batch_size": 4}
# The last bit of a number decides between two codes of e4m3.
CODES = {"kv_cache_dtype": "fp8", "mixed_step": False, "noise": 5e-3}
# Random weights that are larger make larger logits.
RECURRENT = {"noise": 1e-4}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, SPLIT),
    ("deepseek_v3", 2, EXPERTS),
    ("qwen3_5_text", 2, RECURRENT),
]
FULL: list[tuple[str, int, dict[str, Any]]] = [
    *(("gpt_oss", ranks, options) for ranks, options in ((2, {}), (2, SPLIT), (4, SPLIT | {"batch_size": 8}))),
    ("llama", 4, SPLIT | {"batch_size": 8}),
    ("llama", 2, CODES),
    ("qwen3_moe", 2, SPLIT | {"noise": 2e-5}),
    ("qwen3_moe", 4, EXPERTS),
    *((name, 2, EXPERTS) for name in CONFIGS if name != "deepseek_v3"),
    ("nemotron_h", 2, RECURRENT),
]


def check_ranks(function: str, checkpoint: Path, ranks: int, options: dict[str, Any]) -> None:
    given = checkpoint, str(ranks), json.dumps(options), function, Path(__file__).parents[3] / "helpers"
    process = python_process(RANKS, *given, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(ranks))
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and output.splitlines()[-1:] == ["equal"], errors[-3000:]


@pytest.mark.parametrize(
    ("name", "ranks", "options"), [*CASES, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)]
)
def test_ranks_that_run_one_program_give_the_tokens_of_one_rank(
    name: str, ranks: int, options: dict[str, Any], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    if options is RECURRENT:
        model(name).save_pretrained(checkpoint)
    elif "noise" in options and options is not CODES:
        make_checkpoint(name, checkpoint)
    else:
        checkpoint = sharp_checkpoints[name]
    check_ranks("check", checkpoint, ranks, options)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_row_that_is_not_finite_changes_no_other_on_any_rank(ranks: int, sharp_checkpoints: dict[str, Path]) -> None:
    check_ranks("check_rows", sharp_checkpoints["llama"], ranks, {})
