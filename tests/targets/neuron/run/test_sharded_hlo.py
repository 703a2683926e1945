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
sys.path[:0] = sys.argv[4:]
import sharded_programs
ranks = int(sys.argv[2])
options = json.loads(sys.argv[3])
check = getattr(sharded_programs, options.pop("check", "check"))
check(Path(sys.argv[1]), ranks, **options)
print("equal", flush=True)
os._exit(0)  # XLA's threads of several devices do not always end
"""


# One row of each kind: experts are gathered for a decode row, and computed in blocks for a chunk.
FEW_ROWS = {
    "batch_size": 1,
    "ctx_batch_size": 1,
    "sequence_length": 512,
    "prefill_chunk_size": 256,
    "context_buckets": [512],
    "mixed_step": False,
}
NOISE = 2e-5  # of logits up to 5, in float32
OTHERS = [pytest.param(*each, marks=pytest.mark.full) for each in (("llama", 4), ("gpt_oss", 2), ("gpt_oss", 4))]


# Of two ranks of a Llama, the next test shows the same of both forms of each graph.
@pytest.mark.parametrize(("name", "ranks"), [pytest.param("llama", 2, marks=pytest.mark.full), *OTHERS])
def test_ranks_that_run_one_program_give_the_tokens_of_one_rank(
    name: str, ranks: int, sharp_checkpoints: dict[str, Path]
) -> None:
    _run(sharp_checkpoints[name], ranks, {})


# In a graph of each kind ranks can share the tokens evenly.
BOTH_FORMS = {"forms": [False, True], "batch_size": 4}


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), *OTHERS])
def test_ranks_that_split_tokens_give_the_tokens_of_one_rank_and_the_same_bits(
    name: str, ranks: int, sharp_checkpoints: dict[str, Path]
) -> None:
    _run(sharp_checkpoints[name], ranks, BOTH_FORMS | ({"batch_size": 8} if ranks == 4 else {}))


# By as much, where the last bit of a number decides between two codes of e4m3.
OF_CODES = {"kv_cache_dtype": "fp8", "mixed_step": False, "noise": 5e-3}


@pytest.mark.full  # test_hlo_coded_cache.py has a certificate of two ranks
def test_ranks_that_keep_codes_of_their_own_heads_give_the_tokens_of_one_rank(
    sharp_checkpoints: dict[str, Path],
) -> None:
    _run(sharp_checkpoints["llama"], 2, OF_CODES)


@pytest.mark.full
def test_ranks_that_split_tokens_and_experts_compute_the_same_bits(tmp_path: Path) -> None:
    options = BOTH_FORMS | {"noise": NOISE}
    _run(make_checkpoint("qwen3_moe", tmp_path / "checkpoint"), 2, options)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("deepseek_v3", 2),
        *(pytest.param(name, 2, marks=pytest.mark.full) for name in CONFIGS if name != "deepseek_v3"),
        pytest.param("qwen3_moe", 4, marks=pytest.mark.full),
    ],
)
def test_ranks_compute_their_parts_of_the_chosen_experts(name: str, ranks: int, tmp_path: Path) -> None:
    _run(make_checkpoint(name, tmp_path / "checkpoint"), ranks, FEW_ROWS | {"noise": NOISE})


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("nemotron_h", marks=pytest.mark.full)])
def test_ranks_go_on_behind_a_snapshot_of_their_parts_of_a_slots_state(kind: str, tmp_path: Path) -> None:
    model(kind).save_pretrained(tmp_path)
    _run(tmp_path, 2, {"check": "check_snapshots"})


def _run(checkpoint: Path, ranks: int, options: dict[str, Any]) -> None:
    helpers = Path(__file__).parents[3] / "helpers"
    process = python_process(
        RANKS, checkpoint, str(ranks), json.dumps(options), helpers, PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(ranks)
    )
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and output.splitlines()[-1:] == ["equal"], errors[-3000:]
