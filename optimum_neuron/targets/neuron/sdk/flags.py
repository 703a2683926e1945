# SPDX-License-Identifier: Apache-2.0
"""The compiler's options for a graph, which the manifest records, and the runtime's variables: decided here alone."""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from .hardware import LNC_VARIABLE, has_paired_cores


# The first compiler with options for 64-bit integers; their announced defaults are slower, and our graphs have none.
INT64_OPTIONS_SINCE = (2, 27, 5334)
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
EXEC_TIMEOUT_VARIABLE = "NEURON_RT_EXEC_TIMEOUT"
# Seconds. nrt-developer-guide.rst has 600 for trn1 and inf2, and the list of variables 30; the first execution also sets up the
# collectives of all ranks, which takes minutes.
EXEC_TIMEOUT = 600.0
# Eleven days. Whoever waits for a socket counts milliseconds in 32 bits.
LONGEST_TIMEOUT = 1e6
# What NxDI gives its tensorizer (neuronx-distributed-inference, models/model_wrapper.py:89-97): collectives overlap with what does
# not need their result, in pieces of which two are under way (cc_pipeline_tiling_factor of its NeuronConfig), and strided copies are
# single descriptors of DMA. NxDI knows no trn3, so nothing is given there.
_TENSORIZER = "--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2 --vectorize-strided-dma"
# Before trn3 e4m3 ends at 240 (rounding.py), and up to there it has the same bits as the type in the graph. NxDI and vLLM Neuron give the
# option for all these targets, as error code EVRF051 says; trn3 has the type itself, and mixes no two (EOCP001).
_FP8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
_TENSORIZER_TARGETS = ("inf2", "trn1", "trn2")
_ALIASES = {"--optlevel": "-O", "-lnc": "--lnc", "--logical-nc-config": "--lnc", "-o": "--output"}
# Options that change speed alone may be chosen by hand; the others decide what is computed, for which device.
_REPLACEABLE = ("-O", "--model-type", "--tensorizer-options")
# Options with a list of options of a part of the compiler.
_NESTED = ("--tensorizer-options", "--internal-hlo2tensorizer-options", "--internal-backend-options")
_OWN = ("--framework", "--output", "--logfile")


def step_timeout(given: float | None) -> float:
    """Return the seconds for one step: `given`, else the variable's, else EXEC_TIMEOUT; raise ValueError for no such time."""
    variable = os.environ.get(EXEC_TIMEOUT_VARIABLE)
    if given is None and variable is None:
        return EXEC_TIMEOUT
    name, text = (EXEC_TIMEOUT_VARIABLE, variable) if given is None else ("rank_timeout", str(given))
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise ValueError(
            f"{name}={text} is no time for a step; give seconds above 0 and up to {LONGEST_TIMEOUT:,.0f}, or leave it out for "
            f"{EXEC_TIMEOUT:.0f}"
        )
    return seconds


def runtime_environment(inherited: Mapping[str, str], timeout: float, capture: Path | None) -> dict[str, str]:
    """Return the environment of a rank's process; the runtime's variables that are inherited stay.

    The runtime knows whole seconds of `timeout`, and writes a profile to the folder `capture`, if one is given: what Neuron Explorer's
    environment-variables.rst says for any program. nrtpy's save_trace would be a second capture of the same run.
    """
    # Rings of DMA descriptors that stay for the next step; without, rebuilding them dominates the time to submit one. vLLM Neuron's
    # worker sets this number after a sweep (neuron_worker.py: memory grows beyond, latency does not fall).
    environment = {"NEURON_RT_IO_RING_CACHE_SIZE": "32", **inherited, EXEC_TIMEOUT_VARIABLE: str(math.ceil(timeout))}
    if capture is not None:
        # What the device itself does, of the first run of each graph on each core ("model"); "session" captures all runs in one file.
        environment.setdefault("NEURON_RT_INSPECT_DEVICE_PROFILE", "1")
        environment |= {"NEURON_RT_INSPECT_OUTPUT_DIR": str(capture.absolute()), "NEURON_RT_INSPECT_ENABLE": "1"}
    return environment


def compiler_flags(
    target: str, kind: str, *, lnc: int, compiler_version: str, has_fp8: bool = False
) -> tuple[str, ...]:
    """Return the options for one graph without those that name its files and target; `has_fp8`: it takes weights of float8_e4m3fn.

    Token generation runs once per token and gets the longer optimization.
    """
    flags = ["--model-type=transformer", "--auto-cast=none", "-O2" if kind == "token_generation" else "-O1"]
    if target in _TENSORIZER_TARGETS:
        flags.append(f"--tensorizer-options={_TENSORIZER}")
    if has_fp8 and target != "trn3":
        flags.append(f"--internal-hlo2tensorizer-options={_FP8}")
    if has_paired_cores(target):
        flags.append(f"--lnc={lnc}")
        if version_numbers(compiler_version) >= INT64_OPTIONS_SINCE:
            flags += ["--native-int64=disabled", "--implicit-integer-downcast=all"]
    else:
        flags.append("--enable-saturate-infinity")
    return tuple(flags)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, to compare by: 2.27.5334.0+f702b353 gives (2, 27, 5334, 0)."""
    parts = version.partition("+")[0].split(".")
    return tuple(map(int, itertools.takewhile(str.isdigit, parts)))


def add_user_flags(flags: Sequence[str], user: str, target: str) -> tuple[str, ...]:
    """Add the options of NEURON_CC_FLAGS, which replace ours where they change speed alone; raise ValueError for a contradiction."""
    try:
        tokens = shlex.split(user)
    except ValueError as error:
        raise ValueError(f"{FLAGS_VARIABLE}={user!r} cannot be read ({error}); correct or unset it") from error
    ours = {key: (value, given) for key, value, given in _parse_options(flags)}
    ours["--target"] = (target, ())
    for key, value, given in _parse_options(tokens):
        needed = ours[key][0] if key in ours else value
        if key in _OWN or (needed != value and key not in _REPLACEABLE):
            instead = f"needs {key}={needed}" if key in ours and needed is not None else "sets that itself"
            remedy = f"set {LNC_VARIABLE} instead" if key == "--lnc" else "leave it out"
            raise ValueError(f"{FLAGS_VARIABLE} has {' '.join(given)}, but this export {instead}; {remedy}")
        if key not in ours or key in _REPLACEABLE:
            ours[key] = (value, given)
    return tuple(token for _, given in ours.values() for token in given)


def _parse_options(tokens: Sequence[str]) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Return options in order: canonical name, value, and their tokens."""
    options: list[tuple[str, str | None, tuple[str, ...]]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            raise ValueError(f"{FLAGS_VARIABLE} has {token!r}, which is no option; correct or unset it")
        name, separator, value = token.partition("=")
        given: tuple[str, ...] = (token,)
        if token.startswith("-O") and token != "-O":
            name, value = "-O", token[2:]
        elif not separator and rest and (name in _NESTED or not rest[0].startswith("-")):
            value = rest.pop(0)
            given = (token, value)
        name = _ALIASES.get(name, name)
        options.append((name, value or None, (f"-O{value}",) if name == "-O" else given))
    return options
