# SPDX-License-Identifier: Apache-2.0
"""The optimum-cli commands: help, refusals, exit codes, and one way from a checkpoint to an answer."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import io
import logging
import os
import platform
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import python_process
from optimum.commands import optimum_cli

import optimum_neuron.export.recipe
from optimum_neuron import progress
from optimum_neuron.artifact import filesystem
from optimum_neuron.config import ExportOptions, NeuronConfig
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.tools.certify import certify_export


EXPORT_SIZES = ["--target", "eager", "--sequence-length", "64", "--prefill-chunk-size", "8", "--dtype", "float32"]
HIDDEN = ("HF_HUB_DISABLE_PROGRESS_BARS",)  # conftest sets it, a user does not


def run_cli(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", *map(str, args)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 300}
    visible = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return subprocess.run(command, **options, env=visible, check=False)


def call_cli(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> None:
    """The same in this process, where torch is imported already."""
    monkeypatch.setattr(sys, "argv", ["optimum-cli", *map(str, args)])
    optimum_cli.main()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Calls a command, and returns what it wrote to stdout and stderr."""

    def written(*args: str | Path) -> tuple[str, str]:
        call_cli(monkeypatch, *args)
        return capsys.readouterr()

    return written


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    calls: dict[str, Any] = {}

    def export_model(model: str, output: Path, **options: Any) -> Path:
        calls.update(options, model=model, output=output)
        raise RuntimeError("two\n  lines")

    monkeypatch.setattr(optimum_neuron.export.recipe, "export_model", export_model)
    return calls


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cli") / "artifact"
    done = run_cli("export", "neuron", "--model", tiny_checkpoint, *EXPORT_SIZES, output)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}\n"
    assert "2 graphs for eager, exported in" in done.stderr
    assert "chunked_prefill_chunk8_context64" in done.stderr
    assert "it/s" not in done.stderr, "a progress bar, and stderr is no terminal"
    return output


def test_help_names_every_option_in_one_spelling_with_its_default() -> None:
    done = run_cli("export", "neuron", "--help")
    assert done.returncode == 0
    declared = NeuronConfig.declared() | ExportOptions.declared()
    for option in (*(each.flag for each in declared.values() if each.group), "--model", "--overwrite", "--certify"):
        assert re.search(rf"^ +(-m MODEL, )?{option}\b", done.stdout, re.MULTILINE), option
    assert not re.findall(r"--\w+_\w+", done.stdout)
    assert "examples:\n  optimum-cli export neuron --model" in done.stdout
    text = " ".join(done.stdout.split())
    for default in (NeuronConfig.sequence_length, NeuronConfig.target):
        assert f"(default: {default})" in text


def test_help_imports_no_torch() -> None:
    program = (
        "import sys\nfrom optimum.commands.optimum_cli import main\nsys.argv[1:] = ['export', 'neuron', '--help']\n"
        "heavy = {'torch', 'transformers', 'rich', 'starlette', 'uvicorn'}\n"
        "try:\n    main()\nfinally:\n    sys.stderr.write(str(heavy & set(sys.modules)))"
    )
    assert python_process(program).communicate(timeout=60)[1] == "set()"


def test_on_windows_helps_are_shown_and_the_rest_is_refused_in_a_sentence() -> None:
    program = (
        "import sys\nsys.modules |= dict.fromkeys(('fcntl', 'resource'))\nsys.platform = 'win32'\nimport optimum_neuron\n"
        "from optimum.commands.optimum_cli import main\n"
        "for words in (['export', 'neuron', '--help'], ['neuron', 'chat', 'x']):\n"
        "    sys.argv[1:] = words\n    try:\n        main()\n    except SystemExit:\n        pass\n"
        "optimum_neuron.NeuronModelForCausalLM"
    )
    printed, errors = python_process(program).communicate(timeout=60)
    sentence = "runs on Linux and macOS, and this system is Windows; run it in WSL 2 or in a container"
    assert "--sequence-length" in printed and errors.startswith("error: ")
    assert errors.count(sentence) == 2 and f"ImportError: optimum-neuron-runtime {sentence}" in errors


def test_every_option_reaches_the_export_in_both_spellings(
    captured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "-m org/name --task text-generation --revision v1 --token secret --trust-remote-code --overwrite --batch-size 2 "
        "--adapter first --adapter org/second --sequence-length 128 --prefill-chunk-size 32 --prefill-chunk-buckets 8 --ctx-batch-size 2 --context-buckets "
        "64 128 --dtype float16 --tensor-parallel-size 2 --target trn1 --no-mixed-step --no-on-device-sampling --output-logits "
        "--float32-reduce --long-frequencies --dequantize --certify --quantization-calibration a/text"
    )
    config = NeuronConfig(
        batch_size=2, sequence_length=128, prefill_chunk_size=32, prefill_chunk_buckets=(8,), ctx_batch_size=2, mixed_step=False,
        context_buckets=(64, 128), dtype="float16", tensor_parallel_size=2, target="trn1", on_device_sampling=False,
        output_logits=True, float32_reduce=True, long_frequencies=True,
    )  # fmt: skip
    underscored = re.sub(r"(?<=\w)-(?=\w)", "_", options).replace("t_g", "t-g").replace("64 128", "64,128")
    for words in (options, underscored):
        captured.clear()
        with pytest.raises(SystemExit):
            call_cli(monkeypatch, "export", "neuron", "folder", *words.split())
        assert captured == {
            "model": "org/name", "output": Path("folder"), "config": config, "task": "text-generation", "revision": "v1",
            "token": "secret", "trust_remote_code": True, "adapter": ["first", "org/second"], "dequantize": True,
            "quantization_calibration": Path("a/text"), "certify": certify_export, "overwrite": True,
        }  # fmt: skip


def test_no_option_means_the_default_config_and_an_error_is_one_line_or_a_traceback_if_asked(
    captured: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as failure:
        call_cli(monkeypatch, "export", "neuron", "folder", "--model", "m")
    assert captured["config"] == NeuronConfig()
    assert captured.keys() == {"model", "output", "config", "certify", "overwrite"}
    assert failure.value.code == 1 and capsys.readouterr().err == "error: two lines\n"
    monkeypatch.setenv("OPTIMUM_NEURON_DEBUG", "1")
    with pytest.raises(RuntimeError, match="two"):
        call_cli(monkeypatch, "export", "neuron", "folder", "--model", "m")


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "interrupted; nothing was written\n"), (signal.SIGTERM, 143, "")],
)
def test_signals_unwind_so_that_cleanup_runs(
    number: int, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def export_model(*_: Any, **__: Any) -> None:
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(10)
        finally:
            cleaned.append(True)

    monkeypatch.setattr(optimum_neuron.export.recipe, "export_model", export_model)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as failure:
            call_cli(monkeypatch, "export", "neuron", "folder", "--model", "m")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert (failure.value.code, cleaned, capsys.readouterr().err) == (code, [True], message)
    assert signal.getsignal(signal.SIGTERM) == before


def table_rows(shown: str) -> set[tuple[str, ...]]:
    return {tuple(re.split(r"\s*[│┃]\s*", line.strip(" │┃"))) for line in shown.splitlines()}


def test_inspect_shows_config_graphs_and_versions(artifact: Path, cli: Callable[..., tuple[str, str]]) -> None:
    rows = table_rows(cli("neuron", "inspect", artifact)[0])
    assert {("sequence_length", "64"), ("prefill_chunk_size", "8"), ("target", "eager")} <= rows
    assert ("chunked_prefill_chunk8_context64", "1 x 8", "64", "-") in rows
    kept = {row[0]: row[1] for row in rows if row[0] in ("cache per token", "state per slot")}
    assert kept == {"cache per token": "512 bytes", "state per slot": "0 bytes"}
    assert any(row[0] == "exported with torch" for row in rows)
    assert any(row[0] == "weights/model.safetensors" and float(row[-1]) > 0 for row in rows)


def test_names_are_no_markup(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("[red]", "[", "]:smile:")  # a style, its end, which has no start, and a picture
    shutil.copytree(artifact, folder)
    for command in (("inspect", folder), ("estimate", "--model", folder, "--target", "trn2")):
        call_cli(monkeypatch, "neuron", *command)
        assert str(folder) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call_cli(monkeypatch, "neuron", "inspect", folder.parent)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and str(folder.parent) in error


def test_generate_streams_the_answer_reports_speeds_and_warms_up_only_if_it_is_asked_to(
    artifact: Path, cli: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = []
    monkeypatch.setattr(GraphRunner, "warm_up", lambda runner: warmed.append(dict(runner.graph_calls)))
    asked = ("neuron", "generate", artifact, "--prompt", "Hello", "--max-new-tokens")
    out, err = cli(*asked, "5")
    assert out.endswith("\n") and not warmed
    cli(*asked, "1", "--warm-up")
    assert warmed == [{}]
    # "user: Hello\nassistant: " is 23 byte tokens: three chunks of 8.
    assert re.search(r"prompt tokens +│ +23 │", err)
    assert re.search(r"calls of chunked_prefill_chunk8_context64 +│ +3 │", err)
    for row in ("load, s", "TTFT, ms", "generated tokens", "decode, tok/s"):
        assert re.search(rf"{row} +│ +[\d.-]+ │", err), row


def test_the_same_seed_gives_the_same_answer_which_stdout_may_lack_characters_of(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[str, str]]
) -> None:
    words = ["--prompt", "Hello", "--max-new-tokens", "20", "--temperature", "5", "--seed"]
    options = ("neuron", "generate", artifact, *words)
    first, again, other = (cli(*options, seed)[0] for seed in ("1", "1", "2"))
    assert first == again != other and not first.isascii()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    cli(*options, "1")
    assert written.getvalue() == first.encode("ascii", "backslashreplace")


@pytest.mark.parametrize("command", [("neuron", "env"), ("env",)], ids=" ".join)
def test_a_report_names_versions_and_instruction_set(
    command: tuple[str, ...], cli: Callable[..., tuple[str, str]]
) -> None:
    lines = cli(*command)[0].splitlines()
    for name in ("optimum-neuron-runtime", "torch", "transformers", "neuronx-cc"):
        installed = importlib.metadata.version(name) if name != "neuronx-cc" else "not installed"
        assert f"- `{name}` version: {installed}" in lines
    with pytest.raises(SystemExit, match="0"):
        cli("neuron", "--version")
    machine = f"{choose_instruction_set().name} ({platform.machine()}, {os.cpu_count()} cores)"
    assert f"- Instruction set: {machine}" in lines


def test_without_prompt_it_is_read_from_stdin_and_a_person_hears_of_the_chat(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    call_cli(monkeypatch, "neuron", "generate", artifact, "--no-chat-template", "--max-new-tokens", "2")
    assert re.search(r"prompt tokens +│ +3 │", capsys.readouterr().err)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        call_cli(monkeypatch, "neuron", "generate", artifact)
    told = f"give one with --prompt or on stdin, or chat: optimum-cli neuron chat {artifact}"
    assert told in capsys.readouterr().err


def test_a_long_file_is_hashed_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shown = tmp_path / "weights", []
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(filesystem, "_LONG", 10)
    monkeypatch.setattr(filesystem, "_PIECE", 4)

    @contextmanager
    def stage(title: str, total: float | None = None) -> Iterator[Any]:
        shown.append((title, total))
        yield lambda description, work=1: shown.append((description, work))

    monkeypatch.setattr(progress, "stage", stage)
    assert filesystem.file_sha256(path) == hashlib.sha256(b"0123456789").hexdigest()
    assert shown == [("Hashing", 10), ("weights", 4), ("weights", 4), ("weights", 2)]
    path.write_bytes(b"012345678")
    filesystem.file_sha256(path)
    assert len(shown) == 4, "a short file is shown"


STAGES = """
import gc, time
from optimum_neuron import progress
with progress.importing():
    assert not gc.isenabled()
    time.sleep(0.3)
assert gc.isenabled()
with progress.stage("Checking that step graphs compute what the model does", 3) as advance:
    advance("a name of a weight that is longer than the line of a terminal")
    time.sleep(0.3)
"""


def test_a_terminal_shows_each_stage_on_one_line_from_the_imports_on_and_a_file_none() -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    environment.pop("COLUMNS", None)  # pytest-xdist sets it
    subprocess.run([sys.executable, "-c", STAGES], stderr=terminal, env=environment, check=True)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the end of a terminal is an error on Linux
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    assert max(map(len, lines)) <= 60
    assert all(any(re.search(f"{title}.* 0:00:00", each) for each in lines) for title in ("Importing", "Checking"))
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_nested_stages_share_one_display(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "_is_shown", lambda: True)
    with caplog.at_level(logging.INFO, "optimum_neuron.progress"):
        with progress.stage("outer", 2) as advance, progress.stage("inner"):
            thread = threading.Thread(target=advance, args=("first",))
            thread.start()
            thread.join()
            display = progress._display
            assert display is not None
            assert [task.description for task in display.tasks] == ["outer: first", "inner"]
        with pytest.raises(ValueError, match="broken"), progress.stage("failing"):
            raise ValueError("broken")
    assert progress._display is None
    own, other = progress.stage("own"), progress.stage("another thread's")
    other.__enter__()
    with own:
        thread = threading.Thread(target=other.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        display = progress._display
        assert display is not None and display.live.is_started, "the first stage to end took the display with it"
        assert [task.description for task in display.tasks] == ["own"]
    assert progress._display is None
    caplog.records[2:] = []
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["inner", "outer"]
