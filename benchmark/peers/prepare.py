# SPDX-License-Identifier: Apache-2.0
"""What has to be there before anything is measured: environments, conversions, the reference's tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from ..machine import last_error
from .measure import greedy
from .names import PEERS, REFERENCE, Environment, Peer
from .process import Place, WorkerError
from .results import CONVERSION, Group
from .workers.protocol import Sizes, UnsupportedError


INSTALLED = "installed.json"
TEXTS = (
    "The capital of France is",
    "Water boils when its temperature reaches",
    "Once upon a time there was a little",
    "To sort a list of numbers in Python, you can",
)


class UnavailableError(Exception):
    """A peer cannot be had here; the message is the reason in a line."""


def python_of(peer: Peer, folder: Path, avx2: bool) -> Path:
    """Return the interpreter of a peer's environment, which is made if need be.

    Args:
        folder: of all environments.
        avx2: an environment of its own where its packages are built for AVX2.

    Raises:
        UnavailableError: a package does not install.
    """
    if peer.environment is None:
        return Path(sys.executable)
    narrow = dict(peer.environment.avx2) if avx2 else {}
    variables = dict(peer.environment.variables) | narrow
    path = folder / (f"{peer.name}-avx2" if narrow else peer.name)
    wanted = {"packages": list(peer.environment.packages), "variables": variables}
    stamp = path / INSTALLED
    if not (stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == wanted):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        _install(peer.environment, path, variables, folder / f"{path.name}.log")
        stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return (path / "bin" / "python").absolute()


def _install(environment: Environment, path: Path, variables: dict[str, str], log: Path) -> None:
    pip = [str(path / "bin" / "python"), "-m", "pip"]
    commands = [[sys.executable, "-m", "venv", str(path)], [*pip, "install", *environment.packages]]
    if environment.without:
        commands.append([*pip, "uninstall", "--yes", *environment.without])
    # an older build of the same version must not come from pip's cache
    settings = os.environ | variables | ({"PIP_NO_CACHE_DIR": "1"} if variables else {})
    with log.open("w", encoding="utf-8") as said:
        for command in commands:
            if subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=settings, check=False).returncode:
                said.flush()
                raise UnavailableError(f"not installed: {last_error(log)} (see {log})")


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
        """Make the environments of the peers."""
        folder.mkdir(parents=True, exist_ok=True)
        pythons, missing = {}, {}
        for name in peers:
            try:
                pythons[name] = python_of(PEERS[name], folder, avx2)
            except UnavailableError as error:
                missing[name] = str(error)
        return cls(folder.absolute(), threads, sizes, pythons, missing)

    def place(self, peer: Peer, checkpoint: Path, precision: str) -> Place:
        # what a release of the peer converted is not another's
        release = "-".join(peer.environment.packages).replace("==", "-")[-60:] if peer.environment else "here"
        converted, name = self.folder / "converted", f"{checkpoint.name}-{precision}"
        own = {"checkpoint": str(checkpoint), "folder": str(converted / f"{peer.name}-{release}" / name)}
        loading = own | {"precision": precision, "threads": self.threads, "sizes": asdict(self.sizes)}
        python = self.pythons.get(peer.name, Path(sys.executable))
        return Place(peer, python, loading, converted / f"{peer.name}-{name}.log")

    def places(self, group: Group, checkpoint: Path) -> dict[str, Place]:
        """Return the peers that have a group's precision, ready to load; why others are missing goes to the group."""
        places = {}
        for name in self.pythons:
            if group.precision not in PEERS[name].precisions:
                group.explain(name, f"has no {group.precision}")
                continue
            place = self.place(PEERS[name], checkpoint, group.precision)
            try:
                seconds = place.convert()
            except (UnsupportedError, WorkerError) as error:
                group.explain(name, f"conversion: {error}")
                continue
            places[name] = place
            if seconds is not None:
                group.add(CONVERSION, name, seconds)
        return places

    def checks(self, checkpoint: Path) -> tuple[list[list[int]], list[list[int]]]:
        """Return the beginnings of some sentences, as long as each other, and transformers' greedy tokens after them in float32."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
        shortest = min(map(len, prompts))  # of one length, so that who compiles for shapes does it once
        prompts = [prompt[:shortest] for prompt in prompts]
        place = self.place(PEERS[REFERENCE], checkpoint, "float32")
        place.convert()
        with closing(place.start()) as worker:
            worker.ask("load", **place.loading)
            return prompts, greedy(worker, prompts)
