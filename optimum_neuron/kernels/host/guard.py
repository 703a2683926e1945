# SPDX-License-Identifier: Apache-2.0
"""A command that ends when its starter does: `python guard.py LIFELINE PARENT GRACE COMMAND ...`; processes.py starts it.

LIFELINE is the descriptor of a pipe that the starter, the process PARENT, holds at its other end, so that it ends with it, however that
happens; the command then has GRACE seconds. SIGTERM ends it at once. What ends is its process group: the command and all that it
started. A process of its own, since a compiler knows nothing of its starter, and one that computes may not look; and since it waits
for the command, nothing else has to kill by a number that may have passed on. Imports neither the project nor site packages.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time


def main(lifeline: int, parent: int, grace: float, command: list[str]) -> None:
    """Run the command, and end as it ended."""
    os.set_inheritable(lifeline, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is something to end
    ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setpgroup=0, setsigmask=[], setsigdef=ignored_by_python
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(127)
    signal.signal(signal.SIGTERM, lambda number, frame: _end(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_follow, args=(lifeline, parent, grace, child), daemon=True).start()
    _, status = os.waitpid(child, 0)
    _end(child)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status))


def _follow(lifeline: int, parent: int, grace: float, child: int) -> None:
    # The pipe ends at once, but where a fork of the starter holds its other end too; then the parent's number changes.
    while not select.select([lifeline], [], [], 1.0)[0] and os.getppid() == parent:
        pass
    time.sleep(grace)
    _end(child)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids it where all have ended
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
