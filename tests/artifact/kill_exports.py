# SPDX-License-Identifier: Apache-2.0
"""Kills exports at random moments, and runs several at once: `python tests/artifact/kill_exports.py [--kills 25] [--seed 0]`.

After each kill nothing may run on, no artifact or user's file may be lost, and the compile cache may hold whole entries only; the next
export has to end well and leave nothing else behind. With the right to make PID namespaces (root, or a container that allows it),
exports in two of them share output and cache. Takes about a quarter of an hour; the quick part of it is test_writer.py.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from conftest import TINY_CONFIGS, tiny_tokenizer  # noqa: E402
from optimum_neuron.artifact.artifact import Artifact  # noqa: E402
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE  # noqa: E402
from optimum_neuron.artifact.weights import read_weights  # noqa: E402
from optimum_neuron.artifact.writer import check_output  # noqa: E402
from optimum_neuron.targets.cache.store import CompileCache  # noqa: E402


SIZES = ["--batch-size", "2", "--sequence-length", "64", "--prefill-chunk-size", "8", "--dtype", "float32"]
CLI = [sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()", "export", "neuron"]
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Seconds in which whatever a killed export started has to end.
PATIENCE = 10.0


@dataclass
class Room:
    """A folder with a checkpoint, a cache and outputs; every process started here carries a mark."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(self, output: Path, target: str, *options: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited]),
            "HF_HUB_OFFLINE": "1",
            "KILL_EXPORTS_MARK": self.mark,
            CACHE_VARIABLE: str(self.cache),
        }
        command = [*prefix, *CLI, str(output), "--model", str(self.checkpoint), "--target", target, *SIZES, *options]
        return subprocess.Popen(
            command,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def export(self, output: Path, target: str, *options: str) -> float:
        """Exports to the end; returns the seconds."""
        start = time.monotonic()
        process = self.start(output, target, *options)
        _, errors = process.communicate()
        check(process.returncode == 0, f"an undisturbed export failed: {errors}")
        return time.monotonic() - start

    def running(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return found

    def wait_for_silence(self) -> float:
        """Seconds until no process carries the mark."""
        start = time.monotonic()
        while self.running():
            check(time.monotonic() - start < PATIENCE, f"still running: {self.running()}")
            time.sleep(0.05)
        return time.monotonic() - start

    def check_cache(self, target: str) -> int:
        """Every entry is whole; returns their number."""
        if target == "eager" or not self.cache.is_dir():
            return 0
        os.environ[CACHE_VARIABLE] = str(self.cache)
        cache = CompileCache(target)
        entries = [path.name for path in cache.folder.iterdir() if not path.name.startswith(".")]
        with tempfile.TemporaryDirectory() as scratch:
            for key in entries:
                check(cache.fetch(key, Path(scratch), key), f"the cache has half an entry: {key}")
        return len(entries)

    def leftovers(self, output: Path) -> list[str]:
        folders = [output.parent, *(self.cache.iterdir() if self.cache.is_dir() else [])]
        return [str(path) for folder in folders for path in folder.glob(".*")]


def check(condition: object, message: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {message}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def digests(output: Path) -> dict[str, str]:
    """The digests of a whole artifact's files."""
    artifact = Artifact.open(output)
    artifact.verify()
    read_weights(artifact)
    return {name: entry["sha256"] for name, entry in artifact.manifest["files"].items()}


def comparable(found: dict[str, str], target: str) -> dict[str, str]:
    """Without what a C++ compiler wrote: it holds names of temporary folders."""
    return {name: digest for name, digest in found.items() if target == "eager" or not name.startswith("graphs/")}


def kill_one(room: Room, target: str, cold: bool, moment: float, number: signal.Signals, expected: set[str]) -> str:
    """Kills an export that replaces an artifact, checks what is left, and returns a line about it."""
    output = room.folder / "out" / "artifact"
    if cold:
        shutil.rmtree(room.cache, ignore_errors=True)
    process = room.start(output, target, "--overwrite")
    time.sleep(moment)
    process.send_signal(number)
    _, errors = process.communicate()
    silence = room.wait_for_silence()
    ended = process.returncode
    allowed = {-number, 0} | ({143} if number == signal.SIGTERM else set())
    check(ended in allowed, f"status {ended} after {number.name}: {errors}")
    check("Traceback" not in errors, errors)
    batch = Artifact.open(output).config.batch_size
    digests(output)
    check((output / "notes.txt").is_file() or room.leftovers(output), "the user's file is lost")
    left = room.leftovers(output)
    check(ended != 143 or not left, f"an orderly end leaves {left}")
    check_output(output, overwrite=True)
    check((output / "notes.txt").read_text(encoding="utf-8") == "mine", "the user's file is lost")
    check(set(digests(output)) <= expected | {"notes.txt"}, "foreign files in the artifact")
    entries = room.check_cache(target)
    check(batch == 2, "another artifact")
    kind = "cold" if cold else "warm"
    return (
        f"{target:5} {kind} {number.name} after {moment:5.1f} s: status {ended}, silent after {silence:.1f} s, "
        f"{entries} entries, {len(left)} to clean"
    )


def kill_many(room: Room, kills: int, generator: random.Random) -> None:
    output = room.folder / "out" / "artifact"
    plans = []
    for target, cold in (("eager", False), ("cpu", True), ("cpu", False)):
        shutil.rmtree(output.parent, ignore_errors=True)
        if cold:
            shutil.rmtree(room.cache, ignore_errors=True)
        seconds = room.export(output, target)
        say(f"{target} {'cold' if cold else 'warm'}: an undisturbed export takes {seconds:.1f} s")
        plans.append((target, cold, seconds, digests(output)))
    shares = [kills - 2 * (kills // 3), kills // 3, kills // 3]
    for (target, cold, seconds, expected), count in zip(plans, shares, strict=True):
        shutil.rmtree(output.parent, ignore_errors=True)
        room.export(output, target)
        (output / "notes.txt").write_text("mine", encoding="utf-8")
        for turn in range(count):
            number = signal.SIGTERM if turn % 5 == 4 else signal.SIGKILL
            # Half of them in the last quarter, where files take their places.
            low = 0.75 if turn % 2 else 0.0
            moment = generator.uniform(low, 1.02) * seconds
            say(f"  {turn + 1}: " + kill_one(room, target, cold, moment, number, set(expected)))
        room.export(output, target, "--overwrite")
        found = digests(output)
        check(set(found) == set(expected), f"other files: {sorted(set(found) ^ set(expected))}")
        check(
            comparable(found, target) == comparable(expected, target),
            "the export after the kills differs from an undisturbed one",
        )
        check(not room.leftovers(output), f"left: {room.leftovers(output)}")
        check((output / "notes.txt").is_file(), "the user's file is lost")


def race(room: Room, target: str, outputs: list[Path], *options: str, namespaces: bool = False) -> int:
    """Starts exports together; every one ends well, or with one sentence. Returns how many ended well."""
    prefix = NAMESPACE if namespaces else []
    started = [room.start(output, target, *options, prefix=prefix) for output in outputs]
    answers = [(process.communicate()[1], process.returncode) for process in started]
    room.wait_for_silence()
    for errors, status in answers:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        check("Traceback" not in errors, errors)
        check(status == 0 or (status == 1 and len(lines) == 1), f"status {status}: {errors}")
        if lines:
            say(f"    {lines[0]}")
    won = sum(status == 0 for _, status in answers)
    for output in set(outputs):
        digests(output)
        check(not room.leftovers(output), f"left: {room.leftovers(output)}")
    room.check_cache(target)
    return won


def race_all(room: Room, namespaces: bool) -> None:
    where = "in PID namespaces of their own" if namespaces else "side by side"
    for count in (2, 4):
        for target in ("eager", "cpu"):
            same = [room.folder / "out" / "artifact"] * count
            others = [room.folder / "out" / f"artifact{number}" for number in range(count)]
            for outputs, options in ((same, ()), (same, ("--overwrite",)), (others, ())):
                if target == "cpu" and options:
                    continue  # the same code as for eager
                shutil.rmtree(room.folder / "out", ignore_errors=True)
                shutil.rmtree(room.cache, ignore_errors=True)
                won = race(room, target, outputs, *options, namespaces=namespaces)
                folder = "one folder" if outputs is same else "their own folders"
                say(f"  {count} {target} exports to {folder} {' '.join(options)} {where}: {won} ended well")
                check(won == count if outputs is others else won >= 1, "nobody won")
                check(won == 1 or options or outputs is others, "two replaced each other")
                if outputs is others:
                    made = {str(comparable(digests(output), target)) for output in outputs}
                    check(len(made) == 1, "the artifacts differ")


def kill_namespace(room: Room, generator: random.Random) -> None:
    """A whole namespace dies while another one exports to the same folder with the same cache."""
    output = room.folder / "out" / "artifact"
    shutil.rmtree(room.folder / "out", ignore_errors=True)
    shutil.rmtree(room.cache, ignore_errors=True)
    first = room.start(output, "cpu", prefix=NAMESPACE)
    time.sleep(generator.uniform(8, 15))
    second = room.start(output, "cpu", prefix=NAMESPACE)
    time.sleep(generator.uniform(1, 12))
    first.kill()
    first.communicate()
    errors = second.communicate()[1]
    check(second.returncode == 0 or "another process is writing" in errors, errors)
    room.wait_for_silence()
    room.export(output, "cpu", "--overwrite")
    digests(output)
    room.check_cache("cpu")
    check(not room.leftovers(output), f"left: {room.leftovers(output)}")
    say(f"  one of two namespaces was killed: the other ended with status {second.returncode}, nothing is lost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        room = Room(Path(folder))
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(TINY_CONFIGS["llama"](), dtype=torch.float32)
        model.save_pretrained(room.checkpoint)
        tiny_tokenizer().save_pretrained(room.checkpoint)
        say(f"{arguments.kills} kills:")
        kill_many(room, arguments.kills, generator)
        say("at once:")
        race_all(room, namespaces=False)
        if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0:
            race_all(room, namespaces=True)
            kill_namespace(room, generator)
        else:
            say("  PID namespaces are not permitted here")
    say("nothing was lost")


if __name__ == "__main__":
    main()
