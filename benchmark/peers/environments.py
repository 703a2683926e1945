# SPDX-License-Identifier: Apache-2.0
"""An environment for each peer, made once: what it holds stands in names.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .names import Environment, Peer


STAMP = "installed.json"
ERRORS = ("error:", "Error:")


class UnavailableError(Exception):
    """A peer cannot be had here; the message is the reason in a line."""


def python_of(peer: Peer, folder: Path, avx2: bool) -> Path:
    """The interpreter of a peer's environment, which is made if need be.

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
    python, stamp = path / "bin" / "python", path / STAMP
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == wanted:
        return python
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    log = folder / f"{path.name}.log"
    _install(peer.environment, path, variables, log)
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def _install(environment: Environment, path: Path, variables: dict[str, str], log: Path) -> None:
    pip = [str(path / "bin" / "python"), "-m", "pip"]
    commands = [[sys.executable, "-m", "venv", str(path)], [*pip, "install", *environment.packages]]
    if environment.without:
        commands.append([*pip, "uninstall", "--yes", *environment.without])
    with log.open("w", encoding="utf-8") as said:
        for command in commands:
            # an older build of the same version must not come from pip's cache
            settings = os.environ | variables | ({"PIP_NO_CACHE_DIR": "1"} if variables else {})
            if subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=settings, check=False).returncode:
                said.flush()
                raise UnavailableError(f"not installed: {last_error(log)} (see {log})")


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if any(word in line for word in ERRORS)]
    return (named or lines or ["it said nothing"])[-1]
