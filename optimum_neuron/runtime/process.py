# SPDX-License-Identifier: Apache-2.0
"""What a fork does not bring along: whoever depends on threads or devices of its process asks here where it is."""

from __future__ import annotations

import os


_forks = 0  # from the first process of this program down to this one


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class OwnProcess:
    """The process in which it was made. To ask costs no system call, so a token can."""

    def __init__(self) -> None:
        self._forks = _forks

    @property
    def is_here(self) -> bool:
        """False in a process that was forked since."""
        return self._forks == _forks

    def check(self) -> None:
        """Raises RuntimeError in a process that was forked since: there, a computation or a wait would never end."""
        if self._forks != _forks:
            raise RuntimeError(
                "the model was loaded before this process was forked, and a fork brings along neither threads nor devices; "
                "load the model in this process, or start processes by multiprocessing's method 'spawn'"
            )
