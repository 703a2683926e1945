# SPDX-License-Identifier: Apache-2.0
"""The directive `cli-reference`: every command of optimum-cli that this package adds, as its own parser explains it."""

from __future__ import annotations

import importlib
import re
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def commands() -> Iterator[tuple[str, type[Any]]]:
    """Words and class of each command, a command before its subcommands."""
    export = importlib.import_module("optimum.commands.register.export_neuron")
    neuron = importlib.import_module("optimum.commands.register.neuron")
    yield "optimum-cli export neuron", export.NeuronExportCommand
    yield from _with_subcommands("optimum-cli neuron", neuron.NeuronCommand)


def _with_subcommands(words: str, command: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    yield words, command
    for each in command.SUBCOMMANDS:
        yield from _with_subcommands(f"{words} {each.name}", each.subcommand_class)


def parser_of(words: str, command: type[Any]) -> ArgumentParser:
    """The parser that optimum-cli makes for a command, without its subcommands."""
    parser = ArgumentParser(prog=words, add_help=False)
    command.parse_args(parser)
    return parser


def _values(action: Action) -> str:
    if action.nargs == 0:
        return ""
    one = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    assert isinstance(one, str)
    return {None: one, "?": f"[{one}]", "...": "..."}.get(action.nargs, f"{one} ...")


def _term(action: Action) -> str:
    if not action.option_strings:
        return _values(action) if action.metavar or action.choices else action.dest
    return " ".join([", ".join(action.option_strings), _values(action)]).strip()


def _paragraph(text: str) -> nodes.paragraph:
    """Options, and what stands in backquotes, as code."""
    paragraph = nodes.paragraph()
    for number, part in enumerate(re.split(r"(`[^`]+`|(?<![\w-])--[a-z][a-z0-9-]+)", text)):
        paragraph += nodes.literal(text=part.strip("`")) if number % 2 else nodes.Text(part)
    return paragraph


def _blocks(text: str) -> Iterator[nodes.Node]:
    """Paragraphs; what is set in columns, or is indented, stays as it is."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if re.search(r"^ |\S {2,}\S", block, re.MULTILINE):
            yield nodes.literal_block(block, block, language="text")
        else:
            yield _paragraph(" ".join(block.split()))


def section_of(words: str, command: type[Any]) -> nodes.section:
    """What the page has of a command: its description, its options by group, and its examples."""
    parser = parser_of(words, command)
    name = nodes.make_id(words.removeprefix("optimum-cli "))
    section = nodes.section(ids=[name], names=[words])
    section += nodes.title(text=words)
    section += _blocks(parser.description or command.COMMAND.help)
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != SUPPRESS]
        if not actions:
            continue
        section += nodes.rubric(text=group.title or "")
        if group.description:
            section += _paragraph(group.description)
        section += _options(parser, name, actions)
    if parser.epilog:
        section += nodes.literal_block(parser.epilog, parser.epilog.rstrip(), language="text")
    return section


def _options(parser: ArgumentParser, command: str, actions: list[Action]) -> nodes.definition_list:
    formatter, listed = parser._get_formatter(), nodes.definition_list()
    for action in actions:
        name = action.option_strings[-1] if action.option_strings else action.dest
        term = nodes.term(ids=[f"{command}-{name.lstrip('-')}"])
        term += nodes.literal(text=_term(action))
        text = formatter._expand_help(action) if action.help else ""
        listed += nodes.definition_list_item("", term, nodes.definition("", _paragraph(text)))
    return listed


class CliReference(SphinxDirective):
    """Sections of all commands."""

    def run(self) -> list[nodes.Node]:
        sections = [section_of(words, command) for words, command in commands()]
        for section in sections:
            self.state.document.note_explicit_target(section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True}
