# SPDX-License-Identifier: Apache-2.0
"""Messages that docs/troubleshooting.md explains are in the sources; docs/migration.md answers each option that optimum-neuron has."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from documents import ROOT


PAGE = ROOT / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def told() -> frozenset[str]:
    """The texts of the sources, with a sign in the place of each value."""
    found = set()
    for path in [*(ROOT / "optimum_neuron").rglob("*.py"), *(ROOT / "commands").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return frozenset(found)


def test_the_commonest_messages_are_explained_once_each() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 25
    headings = re.findall(r"^### .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) == len(MESSAGES), "a heading below a section is a message"


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_can_be_told(message: str) -> None:
    assert any(message in text for text in told())


ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs" / "migration.md").read_text(encoding="utf-8"), re.MULTILINE)
EXPORT = (
    "--model --task --instance_type --batch_size --sequence_length --tensor_parallel_size --num_cores --trust-remote-code --torch_dtype --cache_dir "
    "--auto_cast --auto_cast_type -O1 -O2 -O3 --disable_neuron_cache --disable-validation --dynamic-batch-size --inline-weights-neff --compiler_workdir "
    "--atol --subfolder --output_attentions --output_hidden_states"
)
CACHE = "create set synchronize --repo_id lookup status cleanup --all --old-versions --wipe --dry-run consolidate"
SERVE = "serve --served_model_name --port --data-parallel-size --allow_non_cached_model embed"
METHODS = "get_neuron_config export from_pretrained generate forward prefill_chunk reset save_pretrained push_to_hub"
FIELDS = (
    "checkpoint_id checkpoint_revision batch_size max_batch_size continuous_batching sequence_length max_context_length n_active_tokens tp_degree "
    "pp_degree ep_degree start_rank_id local_ranks_size torch_dtype fused_qkv target on_device_sampling max_topk prefill_chunk_size "
    "speculation_length output_logits capacity_factor glu_mlp"
)


@pytest.mark.parametrize(
    "names", [EXPORT, CACHE, SERVE, METHODS, FIELDS], ids=["export", "cache", "serve", "methods", "fields"]
)
def test_everything_that_the_incumbent_has_is_answered(names: str) -> None:
    theirs = " ".join(left for left, _ in ROWS)
    missing = [name for name in names.split() if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", theirs)]
    assert not missing
    assert all(right.strip() for _, right in ROWS)
