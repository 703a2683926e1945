# SPDX-License-Identifier: Apache-2.0
"""Every command and every block of Python in README, docs and NEURON.md is run, page by page as one would read it, with a tiny model.

What is not run stands in NOT_RUN, with the reason.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import runpy
import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, ROOT, SHELL, Command, all_commands, blocks, commands
from gguf_files import write_gguf
from optimum.commands import optimum_cli
from served_app import App, start_app
from tiny import TINY_SIZES
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE


# A command that begins so, or has such an option, is not run: why, and who sees to it instead. All of optimum-cli are parsed, by
# tests/test_readme.py.
NOT_RUN = {
    "pip install": "would change the environment of this test; the extras are compared with pyproject.toml, and CI installs them",
    "pipx install": "makes an environment from package indexes",
    "uv tool": "makes an environment from package indexes",
    "make ": "targets are compared with the Makefile; CI runs demo and test, which run this",
    "vllm serve": "vLLM has an environment of its own; tests/vllm/test_surface.py has its parser take it, and other files start its server",
    "--target trn2": "lowering needs torch-xla, which has an environment of its own; tests/targets/neuron exports and lints",
    "--repo org/compiled": "needs a repository on the Hub; tests/targets/cache has a Hub of its own",
    "optimum-cli neuron check": "needs the device that the artifact is for; tests/tools/check runs it on the CPU",
    "optimum-cli neuron golden": "lowering needs torch-xla; tests/targets/neuron/compile writes modules, and tests/tools/golden reads results",
    "python3 golden/run_compiler.py": "needs neuronx-cc; tests/tools/golden runs it with a stand-in",
    "optimum-cli neuron push": "uploads to the Hub; tests/hub has a Hub of its own",
    "push_to_hub(": "uploads to the Hub; tests/hub has a Hub of its own",
    "--trace": "takes a record of requests; tests/tools/tune has some",
    "optimum-cli neuron generate HuggingFaceTB/": "exports anew, which takes long; tests/export/test_first_use.py does it with tiny checkpoints",
    "docker ": "there is no docker here; tests/tools/serve/test_deploy.py reads the files",
    "kubectl": "there is no cluster here; tests/tools/serve/test_deploy.py reads the files",
    "python -m tests.records": "compares what moves of code leave; tests/records does with small models",
    "python3.12 -m venv": "makes an environment for a device's runtime",
    "neuron-ls": "lists a device's cores",
    "export OPTIMUM_NEURON_RANK_PYTHON": "is of a device's runtime",
    "export LD_LIBRARY_PATH": "is of a device's runtime",
}
SMOLLM2, LLAMA, GGUF = "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B", "model.Q4_1.gguf"
# What estimates read of Llama-3.1-8B, but for the number of layers, each of which takes them as long.
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
# The artifact that a page without an export takes for granted: as README and docs/export.md make it.
READY = NeuronConfig(batch_size=4, sequence_length=2048)
# tests/tools/serve/test_serve_process.py runs the one that asks a server.
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "ask_server"]
# Exit codes that tell something else than an error: a lookup finds nothing compiled.
CODES = {("neuron", "cache", "lookup"): (0, 3)}


@dataclass
class Models:
    """Local stand-ins for the models that pages name, and an artifact."""

    paths: dict[str, Path]
    artifact: Path

    def local(self, text: str) -> str:
        for name, path in self.paths.items():
            text = text.replace(name, str(path))
        return text


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    small, large = folder / "small", folder / "large"
    torch.manual_seed(1)
    config = LlamaConfig(**TINY_SIZES | {"max_position_embeddings": 8192, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Random weights never end a text: so that no answer is long, every second token does.
    model.generation_config.eos_token_id = list(range(0, config.vocab_size, 2))
    model.save_pretrained(small)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(small)
    large.mkdir()
    (large / "config.json").write_text(json.dumps(LLAMA_CONFIG), encoding="utf-8")
    write_gguf(small, folder / GGUF, "Q8_0")
    paths = {SMOLLM2: small, LLAMA: large, GGUF: folder / GGUF}
    return Models(paths, export_model(small, folder / "smollm2", config=READY))


def parse(module: str, command: str, words: list[str]) -> Namespace:
    parser = ArgumentParser()
    getattr(importlib.import_module(f"optimum.commands.register.{module}"), command).parse_args(parser)
    return parser.parse_args(words)


@dataclass
class Reader:
    """Who reads a page in an empty folder, with an artifact at hand."""

    models: Models
    patch: pytest.MonkeyPatch
    names: dict[str, Any]
    exported: set[Path] = field(default_factory=set)
    served: App | None = None
    piped: str = ""
    ran: int = 0

    def read(self, language: str, text: str) -> None:
        if language == "python" and not block_reasons(text):
            exec(compile(self.models.local(text), "<page>", "exec"), self.names)
            self.ran += 1
        elif language == "json":
            json.loads(text)
        elif language in SHELL:
            for command in commands(text):
                if not reasons(command):
                    self.run(command)
                    self.ran += 1

    def run(self, command: Command) -> None:
        with self.patch.context() as patch:
            for variable in command.variables:
                patch.setenv(*variable.split("=", 1))
            words = [self.models.local(word) for word in command.words[1:]]
            {"optimum-cli": self.optimum_cli, "curl": self.curl, "printf": self.printf}[command.program](words, patch)

    def optimum_cli(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        if words[:2] == ["export", "neuron"]:
            # For a page's own export in the place of the artifact at hand; it must not export twice to one place.
            output = parse("export_neuron", "NeuronExportCommand", words[2:]).output.absolute()
            if output not in self.exported:
                shutil.rmtree(output, ignore_errors=True)
            self.exported.add(output)
        if words[:2] == ["neuron", "serve"]:
            self.serve(words[2:])
            return
        if words[:2] == ["neuron", "cache"]:  # not the one that other tests use
            patch.setenv(CACHE_VARIABLE, str(Path("compiled").absolute()))
        patch.setattr(sys, "argv", ["optimum-cli", *words])
        patch.setattr(sys, "stdin", io.StringIO(self.piped))
        self.piped = ""
        try:
            optimum_cli.main()
        except SystemExit as ended:
            allowed = next((codes for start, codes in CODES.items() if tuple(words[:3]) == start), (0,))
            assert (ended.code or 0) in allowed, f"optimum-cli {shlex.join(words)} ended with {ended.code}"

    def printf(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        self.piped = words[0].replace("\\n", "\n")

    def serve(self, words: list[str]) -> None:
        """The server's application on the artifact, without its process: tests/tools/serve/test_serve_process.py has that."""
        args = parse("neuron_serve", "NeuronServeCommand", words)
        self.close()
        model, tokenizer = (each.from_pretrained(args.model) for each in (NeuronModelForCausalLM, AutoTokenizer))
        self.served = start_app(model, tokenizer=tokenizer, name=args.served_model_name or str(Path(args.model)))

    def curl(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        assert self.served is not None, "a page has a server started before it is asked"
        parser = ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("-H", "--header", action="append", default=[])
        parser.add_argument("-d", "--data")
        args = parser.parse_args(words)
        path = re.fullmatch(r"http://127\.0\.0\.1:8000(/.*)", args.url)
        assert path is not None, f"{args.url} is not where the server listens"
        headers = dict(header.split(": ", 1) for header in args.header)
        body = None if args.data is None else args.data.encode()
        answer = self.served.request("GET" if body is None else "POST", path[1], body, **headers)
        assert answer.status_code == 200, answer.text
        if body is not None and json.loads(body).get("stream"):
            assert "data: [DONE]" in answer.text

    def close(self) -> None:
        if self.served is not None:
            self.served.close()
            self.served = None


@pytest.fixture
def reader(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    for name in ("smollm2", "llama"):
        shutil.copytree(models.artifact, tmp_path / name)
    shutil.copy(models.paths[GGUF], tmp_path)
    (tmp_path / "text.txt").write_text("A text that a model may meet. " * 40, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    given = {"model": NeuronModelForCausalLM, "tokenizer": AutoTokenizer}
    names = {name: kind.from_pretrained(models.artifact) for name, kind in given.items()}
    reader = Reader(models, monkeypatch, names)
    yield reader
    reader.close()


def reasons(command: Command) -> list[str]:
    line = " ".join((command.program, *command.words[1:]))
    return [why for each, why in NOT_RUN.items() if line.startswith(each) or (each.startswith("--") and each in line)]


def block_reasons(text: str) -> list[str]:
    return [why for words, why in NOT_RUN.items() if words.endswith("(") and words in text]


def runs(document: Path) -> bool:
    python = any(block.language == "python" and not block_reasons(block.text) for block in blocks(document))
    return python or any(not reasons(command) for command in all_commands(document))


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if runs(each)], ids=lambda path: path.name)
def test_what_a_page_shows_runs(document: Path, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(document):
        reader.read(block.language, block.text)
    assert reader.ran


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_an_artifact(
    example: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = models.artifact
    if "--prompt-logits" in example.read_text(encoding="utf-8"):
        sizes = NeuronConfig(batch_size=1, sequence_length=64, prompt_logits=True)
        artifact = export_model(models.paths[SMOLLM2], tmp_path / "artifact", config=sizes)
    monkeypatch.setattr(sys, "argv", [str(example), str(artifact)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_page_of_examples_names_each() -> None:
    named = re.findall(r"^\| `(\w+)\.py`", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(["ask_server", *(path.stem for path in EXAMPLES)])


def test_what_is_not_run_is_there() -> None:
    there = {why for document in DOCUMENTS for command in all_commands(document) for why in reasons(command)}
    python = [block.text for document in DOCUMENTS for block in blocks(document) if block.language == "python"]
    assert [each for each in NOT_RUN if NOT_RUN[each] not in there and not any(each in text for text in python)] == []


def test_extras_that_are_installed_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named = set(",".join(re.findall(r"(?:optimum-neuron-runtime|'\.)\[([\w,]+)\]", text)).split(","))
    assert "serve" in named and not [name for name in named if not re.search(rf"^{name} = \[", project, re.MULTILINE)]
