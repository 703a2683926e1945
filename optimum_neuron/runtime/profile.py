# SPDX-License-Identifier: Apache-2.0
"""A profile: a folder with the trace of this process, and, of a Neuron device, what its runtime captures. Imports no torch."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ..config import NEURON_TARGETS
from .trace import Trace


TRACE_NAME, CAPTURE_NAME = "trace.json", "device"


class Profile:
    """While its context is open, models that are loaded with it tell what they run; the trace is written at its end.

    On the cpu, eager and hlo targets it holds all there is. The processes that hold a Neuron device's ranks write what they
    capture to a folder beside it, the last of it as they end.

    Attributes:
        folder: new with this profile; gone again where nothing ran.
        trace: what ran.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.trace = Trace()

    def __enter__(self) -> Profile:
        """Makes the folder.

        Raises:
            FileExistsError: something has its name.
            OSError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(
                f"a profile would be written to {self.folder}, which exists; name a new folder"
            ) from None
        except OSError as error:
            raise OSError(
                f"a profile cannot be written to {self.folder} ({error.strerror}); name another folder"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Writes the trace, whole or not at all, also of what failed later."""
        if self.trace:
            text = json.dumps(self.trace.to_dict(), separators=(",", ":"))
            unfinished = self.folder / f".{TRACE_NAME}.partial"
            try:
                unfinished.write_text(text + "\n", encoding="utf-8")
                unfinished.replace(self.folder / TRACE_NAME)
            finally:
                unfinished.unlink(missing_ok=True)
        for folder in (self.folder / CAPTURE_NAME, self.folder):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def capture_folder(self, target: str) -> Path | None:
        """Where the runtime of a device's ranks writes; None for a target that has none."""
        if target not in NEURON_TARGETS:
            return None
        folder = self.folder / CAPTURE_NAME
        folder.mkdir(exist_ok=True)
        return folder


def profile_to(folder: Path | None) -> AbstractContextManager[Profile | None]:
    """A profile in a new folder, or none."""
    return nullcontext() if folder is None else Profile(folder)
