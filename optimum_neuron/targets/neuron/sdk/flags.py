# SPDX-License-Identifier: Apache-2.0
"""The compiler's options for a graph, which the manifest records, and the runtime's variables: decided here alone."""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# What NxDI gives (neuronx-distributed-inference 4bcdc54, models/model_wrapper.py:86-147). Its context encoding is here every graph
# with chunks of prompts. Collectives overlap with what does not need their result, in two pieces, but in decode whole: latency bounds
# them there. Strided copies are single descriptors of DMA, which spill in contexts of 128k on joined cores (NCC-6889).
# NxDI knows no trn3, so its options are not given there, but for the threshold: vLLM Neuron 0.24 gives that there as well.
_NXDI_TARGETS = ("inf2", "trn1", "trn2")
_PER_TOKEN = ("token_generation", "sample_decode")
_OF_PROMPTS = ("chunked_prefill", "mixed", "scoring")
_LONG_CONTEXT = 128 * 1024
# Invalid HLO ends a compilation (NxDI since SDK 2.24, which is older than any compiler that is called here).
_VERIFY = "--verify-hlo=true"
# Compiles layers by parts, whatever their work, which saves time. Without NKI it breaks decode (NCC_IBTN006, vLLM Neuron's Qwen3.5).
_BY_LAYERS = "--modular-flow-mac-threshold=10"
# Before trn3 e4m3 ends at 240 (rounding.py), and up to there it has the same bits as the type in the graph. NxDI and vLLM Neuron give the
# option for all these targets, as error code EVRF051 says; trn3 has the type itself, and mixes no two (EOCP001).
_FP8 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
# Descriptors of DMA for indices that are known at run time only are made by the device. NxDI's and optimum-neuron's MoE models ask for it,
# which gather weights of experts; NxDI's Gemma 3 does as well, without such a gather here. Joined cores do so by themselves since 2.27
# (longdct/vllm-neuron's notes of trn2).
_GATHER = ("--internal-enable-dge-levels", "vector_dynamic_offsets")
_GATHER_DEFAULT_SINCE = (2, 27)
_ALIASES = {"--optlevel": "-O", "-lnc": "--lnc", "--logical-nc-config": "--lnc", "-o": "--output"}
# Options that change speed alone may be chosen by hand; the others decide what is computed, for which device.
_HLO_OPTIONS = "--internal-hlo2tensorizer-options"
_REPLACEABLE = ("-O", "--model-type", "--tensorizer-options", _HLO_OPTIONS, _GATHER[0])
# Options with a list of options of a part of the compiler.
_NESTED = ("--tensorizer-options", _HLO_OPTIONS, "--internal-backend-options")
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


@dataclass(frozen=True)
class FlagFacts:
    """What a graph's options depend on in addition to its target.

    Attributes:
        kind: as a manifest names it.
        tokens: of a row at most, whatever of it the graph reads.
        has_fp8: a parameter is float8_e4m3fn.
        gathers_matrices: matrices of a weight are gathered, as those of the experts that a token is routed to.
    """

    kind: str
    tokens: int = 0
    has_fp8: bool = False
    gathers_matrices: bool = False


def compiler_flags(target: str, graph: FlagFacts, *, lnc: int, compiler_version: str) -> tuple[str, ...]:
    """Return the options for one graph without those that name its files and target.

    Token generation runs once per token and gets the longer optimization.
    """
    version, paired = version_numbers(compiler_version), has_paired_cores(target)
    level = "-O2" if graph.kind == "token_generation" else "-O1"
    flags = ["--model-type=transformer", "--auto-cast=none", level]
    if target in _NXDI_TARGETS:
        pieces = 1 if graph.kind in _PER_TOKEN else 2
        tensorizer = ["--enable-ccop-compute-overlap", f"--cc-pipeline-tiling-factor={pieces}"]
        if not (lnc == 2 and graph.kind in _OF_PROMPTS and graph.tokens >= _LONG_CONTEXT):
            tensorizer.append("--vectorize-strided-dma")
        flags.append(f"--tensorizer-options={' '.join(tensorizer)}")
    given = {
        _BY_LAYERS: graph.kind in _OF_PROMPTS,
        _FP8: graph.has_fp8 and target != "trn3",
        _VERIFY: target in _NXDI_TARGETS,
    }
    if any(given.values()):
        flags.append(f"{_HLO_OPTIONS}={' '.join(option for option, wanted in given.items() if wanted)}")
    if graph.gathers_matrices and not (paired and version >= _GATHER_DEFAULT_SINCE):
        flags += _GATHER
    if not paired:
        return (*flags, "--enable-saturate-infinity")
    int64 = ["--native-int64=disabled", "--implicit-integer-downcast=all"] if version >= INT64_OPTIONS_SINCE else []
    return (*flags, f"--lnc={lnc}", *int64)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, to compare by: 2.27.5334.0+f702b353 gives (2, 27, 5334, 0)."""
    parts = version.partition("+")[0].split(".")
    return tuple(map(int, itertools.takewhile(str.isdigit, parts)))


def kind_variable(kind: str) -> str:
    """Name the variable with options for the graphs of one kind."""
    return f"{FLAGS_VARIABLE}_{kind.upper()}"


def check_variables(kinds: Sequence[str]) -> None:
    """Raise ValueError where a variable has options for a kind of graph that there is not."""
    known = [kind_variable(kind) for kind in kinds]
    for name in os.environ:
        if name.startswith(FLAGS_VARIABLE + "_") and name not in known:
            raise ValueError(f"{name} is for no kind of graph; use one of {', '.join(known)}, or unset it")


def add_user_flags(flags: Sequence[str], target: str, user: Mapping[str, str]) -> tuple[str, ...]:
    """Add the options of variables, which replace those before them, and ours where they change speed alone.

    Raise ValueError for a contradiction to ours, and for what is no option.
    """
    fixed = {key: (value, given) for key, value, given in _parse_options(flags, "")}
    fixed["--target"] = (target, ())
    merged = dict(fixed)
    for variable, text in user.items():
        try:
            tokens = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r} cannot be read ({error}); correct or unset it") from error
        for key, value, given in _parse_options(tokens, variable):
            needed = fixed[key][0] if key in fixed else value
            if key in _OWN or (needed != value and key not in _REPLACEABLE):
                instead = f"needs {key}={needed}" if key in fixed and needed is not None else "sets that itself"
                remedy = f"set {LNC_VARIABLE} instead" if key == "--lnc" else "leave it out"
                raise ValueError(f"{variable} has {' '.join(given)}, but this export {instead}; {remedy}")
            if key == _HLO_OPTIONS and _FP8 in (needed or "").split() and _FP8 not in (value or "").split():
                value = f"{value or ''} {_FP8}".strip()  # the type of numbers is no matter of speed
                given = (f"{key}={value}",)
            if key not in fixed or key in _REPLACEABLE:
                merged[key] = (value, given)
    return tuple(token for _, given in merged.values() for token in given)


def _parse_options(tokens: Sequence[str], variable: str) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Return a variable's options in order: canonical name, value, and their tokens."""
    options: list[tuple[str, str | None, tuple[str, ...]]] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            raise ValueError(f"{variable} has {token!r}, which is no option; correct or unset it")
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
