# SPDX-License-Identifier: Apache-2.0
"""Folders for unfinished work: hidden, named after their process, removed when it ends or, if killed, by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def partial_folder(parent: Path, stem: str) -> Iterator[Path]:
    """Yields a new folder `parent/.<stem>.partial-<pid>-<random>`; whatever is left of it is removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent, stem)
    folder = Path(tempfile.mkdtemp(prefix=f".{stem}.partial-{os.getpid()}-", dir=parent))
    folder.chmod(0o755)  # mkdtemp's 0700 would stay with the finished artifact
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, stem: str) -> None:
    for folder in parent.glob(f".{stem}.partial-*"):
        pid = folder.name.removeprefix(f".{stem}.partial-").partition("-")[0]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
