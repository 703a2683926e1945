# SPDX-License-Identifier: Apache-2.0
"""vLLM's server in the place of this process. Imports nothing heavy: vLLM imports it again."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def has_vllm() -> bool:
    """Return whether vLLM is installed; a folder of that name is not vLLM."""
    found = importlib.util.find_spec("vllm")
    return found is not None and found.has_location


def vllm_command(
    artifact: Path, *, name: str, host: str, port: int, trust_remote_code: bool, options: Sequence[str]
) -> list[str]:
    """Return the words of `vllm serve` for an artifact, which brings its sizes itself.

    Args:
        options: vLLM's own, which go last, so that they win.
    """
    # The module of vLLM's console script, which need not be where this interpreter is.
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(artifact)]
    words += ["--served-model-name", name, "--host", host, "--port", str(port)]
    return [*words, *(["--trust-remote-code"] if trust_remote_code else []), *options]


def vllm_environment(*, api_key: str | None, rank_python: str | None, rank_timeout: float | None) -> dict[str, str]:
    """Return this process's environment with the settings of vLLM and its plugin: every user sees a key on a command line."""
    given = {
        "VLLM_API_KEY": api_key,
        "OPTIMUM_NEURON_RANK_PYTHON": rank_python,
        "NEURON_RT_EXEC_TIMEOUT": None if rank_timeout is None else f"{rank_timeout:g}",
    }
    return {**os.environ, **{key: value for key, value in given.items() if value is not None}}


def become_vllm(words: Sequence[str], environment: dict[str, str]) -> None:
    """Replace this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], list(words), environment)
