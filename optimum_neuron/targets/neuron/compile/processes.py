# SPDX-License-Identifier: Apache-2.0
"""One call of a compiler: in a folder of its own, bounded in time, and its failure explained."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....kernels.host.processes import Processes
from ..sdk.compiler_errors import explain_failure


OUTPUT_LOG = "output.log"


def run_compiler(
    processes: Processes,
    argv: Sequence[str],
    executable: str,
    folder: Path,
    environment: Mapping[str, str],
    timeout: float,
) -> None:
    """Runs one compiler in a folder of its own, where it may leave files.

    Args:
        executable: the program, in place of `argv[0]`.
        timeout: seconds.

    Raises:
        RuntimeError: it failed or took too long; the message holds the end of its output.
    """
    # Its own, so that nothing stays; not below `folder`, whose path may be too long for a socket.
    with (
        tempfile.TemporaryDirectory(prefix="neuronx-cc-", ignore_cleanup_errors=True) as temporary,
        (folder / OUTPUT_LOG).open("wb") as output,
        processes.start(
            [executable, *argv[1:]],
            cwd=folder,
            env={**environment, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the compiler did not finish within {timeout:,.0f} s and was ended; lower prefill_chunk_size or "
                f"sequence_length, or raise tensor_parallel_size\n{_tail(folder)}"
            ) from None
    if status != 0:
        raise RuntimeError(explain_failure(status, _tail(folder)))


def _tail(folder: Path) -> str:
    """The end of what a compiler printed and logged: an NCC code may stand in either."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            parts.append(file.read().decode("utf-8", errors="replace").strip())
    return "\n".join(part for part in parts if part)
