# SPDX-License-Identifier: Apache-2.0
"""Options for the processes that hold a Neuron device's ranks; other targets have none and refuse them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankOptions:
    """Choices for the processes of ranks; None is what the environment says, or the default.

    Attributes:
        python: the interpreter of an environment that has numpy and a Neuron runtime.
        timeout: seconds that one step may take.
        capture: an existing folder to which the ranks' runtime writes a profile.
    """

    python: str | None = None
    timeout: float | None = None
    capture: Path | None = None

    def refuse(self, target: str) -> None:
        """Raise ValueError where something is chosen, for a target that runs in this process."""
        for option, value in (("rank_python", self.python), ("rank_timeout", self.timeout), ("capture", self.capture)):
            if value is not None:
                raise ValueError(
                    f"{option}={value!r} is for the processes of a Neuron device, and an artifact for {target} runs in this "
                    f"one; leave it out"
                )


IN_ENVIRONMENT = RankOptions()
