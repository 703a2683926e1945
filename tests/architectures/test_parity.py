# SPDX-License-Identifier: Apache-2.0
"""Every causal language model of the installed transformers: exported exactly, or refused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import transformers
from configs import ARCHITECTURES
from parity import Outcome, compare
from table import TABLE, rows_of, status, why


Compare = Callable[[str], Outcome]
# What people serve most, and one of each mechanism.
NEEDED = (
    "llama", "qwen3", "gemma3_text", "phi3", "gpt2", "falcon", "gptj", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text",
    "gemma3n_text", "diffllama", "hrm_text", "lfm2_moe", "qwen3_next", "kimi_linear", "nemotron_h", "zamba2", "minimax", "recurrent_gemma",
    "zaya", "roformer",
)  # fmt: skip


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    found: dict[str, Outcome] = {}

    def find(name: str) -> Outcome:
        if name not in found:
            found[name] = compare(name, tmp_path_factory.mktemp(name))
        return found[name]

    return find


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_exact_or_refused(outcome: Compare, name: str) -> None:
    result = outcome(name)
    assert status(result) in ("exact", "refused", "not tested"), result
    if status(result) == "refused":
        assert result.reason and "optimum_neuron'" not in result.reason


@pytest.mark.parametrize("name", NEEDED)
def test_what_people_serve_is_exact(outcome: Compare, name: str) -> None:
    assert outcome(name).exact, outcome(name)


@pytest.mark.full
def test_at_least_a_hundred_architectures_are_exact(outcome: Compare) -> None:
    exact = [name for name in ARCHITECTURES if outcome(name).exact]
    assert len(exact) >= 100, exact


def test_all_documents_count_as_the_table_does() -> None:
    found = rows_of(TABLE.read_text(encoding="utf-8"))
    count = Counter(kind for kind, _ in found.values())
    eager = [name for name, (kind, reason) in found.items() if kind == "exact" and "target eager only" in reason]
    head, page, readme = (
        " ".join((TABLE.parent / name).read_text(encoding="utf-8").split())
        for name in ("MODELS.md", "docs/guarantees.md", "README.md")
    )
    assert f" {count['exact']} are exact, {count['refused']} are refused by " in head
    assert f" {count['not tested']} could not be made here." in head
    names = ", ".join(eager[:-1]) + f" and {eager[-1]}"
    assert (
        f"{len(found)} model types for causal language models, {count['exact']} are exact ({names} on the eager target only) and "
        f"{count['refused']} are refused" in page
    )
    assert f"{count['exact']} of {len(found)} model types are exact" in readme


@pytest.mark.full
def test_the_table_says_what_a_run_finds(outcome: Compare) -> None:
    text = TABLE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" not in text:
        pytest.skip("the table is of another version of transformers")
    expected = {name: (status(outcome(name)), why(outcome(name))) for name in ARCHITECTURES}
    assert rows_of(text) == expected, "write it anew: python tests/architectures/table.py"
