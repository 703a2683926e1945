# SPDX-License-Identifier: Apache-2.0
"""Every call of `vllm serve` in the documents is one that vLLM's own parser takes."""

from __future__ import annotations

import pytest
from documents import DOCUMENTS, Command, all_commands, code_spans, commands
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def _calls() -> list[Command]:
    shown = [command for document in DOCUMENTS for command in all_commands(document)]
    named = [command for span in code_spans() if span.startswith("vllm serve ") for command in commands(span)]
    return [command for command in shown + named if command.words[:2] == ("vllm", "serve")]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("words", sorted({command.words[2:] for command in _calls()}), ids=" ".join)
def test_vllm_takes_what_the_documents_tell_to_type(words: tuple[str, ...], parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(list(words)).model_tag == words[0]
