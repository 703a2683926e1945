# SPDX-License-Identifier: Apache-2.0
"""The compiler's options, by target and kind of graph, and those that users add."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence

import pytest

from optimum_neuron.targets.neuron.sdk.flags import (
    FlagFacts,
    add_user_flags,
    compiler_flags,
    kind_variable,
    runtime_environment,
    step_timeout,
)
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS, GIB, chip_of, hosts_of, logical_core_size


NEW, OLD = "2.27.5334.0+f702b353", "2.26.6360.0"
FP8, INT64 = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3", "--native-int64=disabled --implicit-integer-downcast=all"
DGE = "--internal-enable-dge-levels vector_dynamic_offsets"
_TENSORIZER = "--enable-ccop-compute-overlap --cc-pipeline-tiling-factor={} --vectorize-strided-dma"
NXDI = "--auto-cast=none --model-type=transformer --verify-hlo=true --lnc=2 " + _TENSORIZER
DECODE, CONTEXT = NXDI.format(1) + " -O2", NXDI.format(2) + " -O1 --modular-flow-mac-threshold=10"
LONG = CONTEXT.replace(" --vectorize-strided-dma", "")
# Mixtral and Qwen3-MoE of both; accumulation in float32 is the compiler's default.
MOE = f"--auto-cast=none --model-type=transformer -O1 --enable-saturate-infinity {DGE} --verify-hlo=true {_TENSORIZER.format(2)}"
VLLM = "--auto-cast=none -O1 --modular-flow-mac-threshold=10"  # and options of the backend, for NKI kernels


def words(flags: Sequence[str]) -> set[str]:
    nested = r"^--(?:tensorizer|internal-hlo2tensorizer)-options="
    return {word for flag in flags for word in re.sub(nested, "", flag).split()}


@pytest.mark.parametrize(
    ("graph", "target", "lnc", "version", "public", "removed", "added"),
    [
        # NxD Inference 4bcdc54 and vLLM Neuron 0.24; what else they give chunked prefill unrolls layers, which no document explains
        (FlagFacts("token_generation"), "trn2", 2, OLD, DECODE, "", ""),
        (FlagFacts("chunked_prefill"), "trn2", 2, OLD, CONTEXT, "", ""),
        (FlagFacts("scoring", 128 * 1024), "trn2", 2, OLD, LONG, "", ""),
        (FlagFacts("mixed", 128 * 1024), "trn2", 1, OLD, CONTEXT, "--lnc=2", "--lnc=1"),
        (FlagFacts("chunked_prefill", has_fp8=True), "trn2", 2, NEW, f"{CONTEXT} {FP8}", "", INT64),
        (FlagFacts("token_generation", has_fp8=True), "inf2", 1, NEW, f"{DECODE} {FP8}", "--lnc=2", "--enable-saturate-infinity"),
        (FlagFacts("sample_decode"), "trn2", 2, OLD, DECODE, "-O2", "-O1"),
        (FlagFacts("copy_slot"), "trn2", 2, OLD, CONTEXT, "--modular-flow-mac-threshold=10", ""),
        (FlagFacts("chunked_prefill", gathers_matrices=True), "trn1", 1, NEW, MOE, "", "--modular-flow-mac-threshold=10"),
        (FlagFacts("chunked_prefill", gathers_matrices=True), "trn2", 2, OLD, f"{CONTEXT} {DGE}", "", ""),
        (FlagFacts("chunked_prefill", gathers_matrices=True), "trn2", 2, NEW, CONTEXT, "", INT64),
        (FlagFacts("scoring", has_fp8=True), "trn3", 2, NEW, VLLM, "", f"--model-type=transformer --lnc=2 {INT64}"),
        (FlagFacts("token_generation"), "trn3", 2, OLD, VLLM, "-O1 --modular-flow-mac-threshold=10", "-O2 --model-type=transformer --lnc=2"),
    ],
)  # fmt: skip
def test_options_are_those_of_public_code_but_for_these(
    graph: FlagFacts, target: str, lnc: int, version: str, public: str, removed: str, added: str
) -> None:
    ours = words(compiler_flags(target, graph, lnc=lnc, compiler_version=version))
    more, less = ours - {*public.split()}, {*public.split()} - ours
    sys.stdout.write(f"{target} {graph}: without {' '.join(sorted(less))}; with {' '.join(sorted(more))}\n")
    assert (less, more) == ({*removed.split()}, {*added.split()})


def test_logical_core_size_follows_the_environment_where_the_target_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert logical_core_size("trn2") == logical_core_size("trn1") == 1
    apart, host = chip_of("trn2"), hosts_of("trn2", 128)[0]
    assert (host.name, host.cores, apart.core_hbm) == ("trn2.48xlarge", 128, 12 * GIB) and apart is chip_of("trn2")
    assert 2 * apart.core_sbuf == CHIPS["trn2"].core_sbuf and chip_of("trn2", 2) is CHIPS["trn2"]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert chip_of("trn2") is CHIPS["trn2"] and chip_of("inf2") is CHIPS["inf2"] and not hosts_of("trn2", 128)
    with pytest.raises(ValueError, match=r"NEURON_LOGICAL_NC_CONFIG=2, but a logical core of trn1 has 1 physical"):
        logical_core_size("trn1")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    with pytest.raises(ValueError, match=r"=3, but a logical core of trn2 has 1 or 2 physical cores; .* set it to 2"):
        chip_of("trn2")


HLO = "--internal-hlo2tensorizer-options"
OURS = ("--auto-cast=none", "-O1", "--lnc=2", f"{HLO}={FP8} --verify-hlo=true")
SAME = " ".join(OURS)


@pytest.mark.parametrize(
    ("user", "of_kind", "expected"),
    [
        ("--verbose 35 --internal-x='a b'", "", f"{SAME} --verbose 35 --internal-x=a b"),
        ("--optlevel 3", "", SAME.replace("-O1", "-O3")),
        ("-O3 --verbose=35", "-O2 --verbose=0", f"{SAME.replace('-O1', '-O2')} --verbose=0"),
        ("-lnc 2 --target=trn2", "--enable-fast-context-switch", f"{SAME} --enable-fast-context-switch"),
        ("", f"{HLO} '--a --b'", SAME.replace(f"{FP8} --verify-hlo=true", f"--a --b {FP8}")),
        (f"{HLO}={FP8}", "", SAME.replace(" --verify-hlo=true", "")),
        ("", "--tensorizer-options '--a=4 --b'", f"{SAME} --tensorizer-options --a=4 --b"),
    ],
)
def test_user_flags_are_added_or_replace_what_only_changes_speed(user: str, of_kind: str, expected: str) -> None:
    given = {"NEURON_CC_FLAGS": user, kind_variable("mixed"): of_kind}
    assert " ".join(add_user_flags(OURS, "trn2", given)) == expected


@pytest.mark.parametrize(
    ("given", "variable", "seconds"), [(None, None, 600.0), (None, "30", 30.0), (5.5, "30", 5.5), (7.0, None, 7.0)]
)
def test_a_step_has_the_time_of_the_option_the_variable_or_600_seconds(
    given: float | None, variable: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_RT_EXEC_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", variable)
    assert step_timeout(given) == seconds
    environment = runtime_environment({"NEURON_RT_EXEC_TIMEOUT": "1", "HOME": "/"}, seconds, None)
    assert environment == {
        "HOME": "/", "NEURON_RT_IO_RING_CACHE_SIZE": "32", "NEURON_RT_EXEC_TIMEOUT": str(math.ceil(seconds)),
    }  # fmt: skip
    assert runtime_environment({"NEURON_RT_IO_RING_CACHE_SIZE": "8"}, 1.0, None)["NEURON_RT_IO_RING_CACHE_SIZE"] == "8"


@pytest.mark.parametrize(
    ("given", "variable", "message"),
    [
        (0.0, None, r"rank_timeout=0\.0 is no time for a step; give seconds above 0 and up to 1,000,000"),
        (float("nan"), "5", r"rank_timeout=nan is no time"),
        (1e7, None, r"rank_timeout=10000000\.0 is no time .* up to 1,000,000"),
        (None, "soon", r"NEURON_RT_EXEC_TIMEOUT=soon is no time for a step; .*, or leave it out for 600"),
    ],
)
def test_what_is_no_time_is_refused(
    given: float | None, variable: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("NEURON_RT_EXEC_TIMEOUT", variable)
    with pytest.raises(ValueError, match=message):
        step_timeout(given)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("--lnc 1", r"NEURON_CC_FLAGS has --lnc 1, but this export needs --lnc=2; set NEURON_LOGICAL_NC_CONFIG"),
        ("--target trn1", r"has --target trn1, but this export needs --target=trn2; leave it out"),
        ("--auto-cast=all", r"has --auto-cast=all, but this export needs --auto-cast=none"),
        ("--output x", r"has --output x, but this export sets that itself"),
        ("trn2", r"has 'trn2', which is no option"),
        ("'", r"cannot be read \(No closing quotation\)"),
    ],
)
def test_user_flags_that_contradict_are_refused(user: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_user_flags(OURS, "trn2", {"NEURON_CC_FLAGS": user})
