# SPDX-License-Identifier: Apache-2.0
"""What has to be there before anything is measured: environments, checkpoints, conversions, the reference's tokens."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .environments import UnavailableError, python_of
from .measure import Place, greedy
from .names import OURS, PEERS, REFERENCE, Peer
from .process import Worker, WorkerError
from .results import CONVERSION, Group
from .workers.protocol import Sizes, UnsupportedError


STAMP = "converted.json"
TEXTS = (
    "The capital of France is",
    "Water boils when its temperature reaches",
    "Once upon a time there was a little",
    "To sort a list of numbers in Python, you can",
)


@dataclass(frozen=True)
class Workshop:
    """The folder of all that is kept from run to run, and what all workers share.

    Attributes:
        pythons: the interpreter of each peer that there is.
        missing: why each other peer is not there.
    """

    folder: Path
    threads: int
    sizes: Sizes
    pythons: dict[str, Path]
    missing: dict[str, str]

    @classmethod
    def open(cls, folder: Path, peers: Sequence[str], threads: int, sizes: Sizes, avx2: bool) -> Workshop:
        """Makes the environments of the peers."""
        folder.mkdir(parents=True, exist_ok=True)
        pythons, missing = {}, {}
        for name in peers:
            try:
                pythons[name] = python_of(PEERS[name], folder, avx2).absolute()
            except UnavailableError as error:
                missing[name] = str(error)
        return cls(folder.absolute(), threads, sizes, pythons, missing)

    def place(self, peer: Peer, checkpoint: Path, precision: str) -> Place:
        python, name = self.pythons[peer.name], f"{checkpoint.name}-{precision}"
        # what a release of the peer converted is not another's
        release = "-".join(peer.environment.packages).replace("==", "-")[-60:] if peer.environment else "here"
        folder = self.folder / "converted" / f"{peer.name}-{release}" / name
        return Place(peer, python, folder, self.folder / "converted" / f"{peer.name}-{name}.log")

    def convert(self, place: Place, checkpoint: Path, precision: str) -> float | None:
        """Has a peer write what it loads, unless an earlier run did; seconds, of that run if need be.

        Raises:
            WorkerError: it failed.
            UnsupportedError: it has no such precision.
        """
        stamp = place.folder / STAMP
        # Our exports know themselves whether they are out of date.
        ours = place.peer.worker[0] == PEERS[OURS].worker[0]
        if stamp.is_file() and not ours:
            seconds: float | None = json.loads(stamp.read_text(encoding="utf-8"))["seconds"]
            return seconds
        if not ours:
            shutil.rmtree(place.folder, ignore_errors=True)
        place.folder.mkdir(parents=True, exist_ok=True)
        with closing(place.start(self.threads)) as worker:
            seconds = worker.ask(
                "convert",
                checkpoint=str(checkpoint),
                precision=precision,
                folder=str(place.folder),
                sizes=asdict(self.sizes),
            )["seconds"]
        stamp.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
        return seconds

    def load_arguments(self, place: Place, precision: str) -> dict[str, Any]:
        """Of a worker's `load`."""
        return {
            "folder": str(place.folder),
            "precision": precision,
            "threads": self.threads,
            "sizes": asdict(self.sizes),
        }

    def places(self, group: Group, checkpoint: Path) -> dict[str, Place]:
        """The peers that have a group's precision, ready to load; why others are missing goes to the group."""
        places = {}
        for name in self.pythons:
            peer = PEERS[name]
            if group.precision not in peer.precisions:
                group.explain(name, f"has no {group.precision}")
                continue
            place = self.place(peer, checkpoint, group.precision)
            try:
                seconds = self.convert(place, checkpoint, group.precision)
            except (UnsupportedError, WorkerError) as error:
                group.explain(name, f"conversion: {error}")
                continue
            places[name] = place
            if seconds is not None:
                group.add(CONVERSION, name, seconds)
        return places

    @contextmanager
    def reference(self, checkpoint: Path) -> Iterator[Worker]:
        """transformers in float32, with its defaults."""
        here = replace(self, pythons={REFERENCE: Path(sys.executable)})
        place = here.place(PEERS[REFERENCE], checkpoint, "float32")
        here.convert(place, checkpoint, "float32")
        with closing(place.start(self.threads)) as worker:
            worker.ask("load", **self.load_arguments(place, "float32"))
            yield worker

    def checks(self, checkpoint: Path) -> tuple[list[list[int]], list[list[int]]]:
        """The beginnings of some sentences, as long as each other, and the reference's greedy tokens behind them."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
        shortest = min(map(len, prompts))  # of one length, so that who compiles for shapes does it once
        prompts = [prompt[:shortest] for prompt in prompts]
        with self.reference(checkpoint) as worker:
            return prompts, greedy(worker, prompts)


def live_together(weights: int, peers: int, precision_bits: int, available: int) -> bool:
    """Whether all workers fit into memory at once: twice the weights, and half a gigabyte for each."""
    return peers * (2 * weights * precision_bits // 8 + (1 << 29)) < available


def available_memory() -> int:
    """Bytes that processes can still take."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
