# SPDX-License-Identifier: Apache-2.0
"""The compiler's options, by target and kind of graph, and those that users add."""

from __future__ import annotations

import math

import pytest

from optimum_neuron.targets.neuron.sdk.flags import (
    add_user_flags,
    compiler_flags,
    runtime_environment,
    step_timeout,
)
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS, GIB, chip_of, hosts_of, logical_core_size


TENSORIZER = "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=2 --vectorize-strided-dma"
NEW, OLD = "2.27.5334.0+f702b353", "2.26.6360.0"


@pytest.mark.parametrize(
    ("target", "kind", "version", "expected"),
    [
        ("trn1", "token_generation", NEW, "-O2 --enable-saturate-infinity"),
        ("inf2", "chunked_prefill", NEW, "-O1 --enable-saturate-infinity"),
        ("trn2", "token_generation", NEW, "-O2 --lnc=2 --native-int64=disabled --implicit-integer-downcast=all"),
        ("trn2", "mixed", OLD, "-O1 --lnc=2"),
        ("trn3", "chunked_prefill", "2.28.1", "-O1 --lnc=2 --native-int64=disabled --implicit-integer-downcast=all"),
        ("trn3", "copy_slot", OLD, "-O1 --lnc=2"),
    ],
)
def test_options_of_each_target_and_kind(target: str, kind: str, version: str, expected: str) -> None:
    flags = compiler_flags(target, kind, lnc=logical_core_size(target), compiler_version=version)
    level, *others = expected.split()
    tensorizer = [] if target == "trn3" else [TENSORIZER]
    assert flags == ("--model-type=transformer", "--auto-cast=none", level, *tensorizer, *others)


def test_all_but_trn3_are_told_to_take_their_own_e4m3() -> None:
    added = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
    for target, expected in (("inf2", {added}), ("trn2", {added}), ("trn3", set())):
        plain, told = (
            compiler_flags(target, "mixed", lnc=2, compiler_version=NEW, has_fp8=has_fp8) for has_fp8 in (False, True)
        )
        assert {*told} - {*plain} == expected


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


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", "--auto-cast=none -O1 --lnc=2"),
        ("--verbose 35 --internal-x='a b'", "--auto-cast=none -O1 --lnc=2 --verbose 35 --internal-x=a b"),
        ("--optlevel 3", "--auto-cast=none -O3 --lnc=2"),
        ("-lnc 2 --target=trn2", "--auto-cast=none -O1 --lnc=2"),
        (
            "--tensorizer-options '--cc-pipeline-tiling-factor=4 --a'",
            "--auto-cast=none -O1 --lnc=2 --tensorizer-options --cc-pipeline-tiling-factor=4 --a",
        ),
        ("--enable-fast-context-switch", "--auto-cast=none -O1 --lnc=2 --enable-fast-context-switch"),
    ],
)
def test_user_flags_are_added_or_replace_what_only_changes_speed(user: str, expected: str) -> None:
    assert " ".join(add_user_flags(("--auto-cast=none", "-O1", "--lnc=2"), user, "trn2")) == expected
    flags = add_user_flags((TENSORIZER,), "--tensorizer-options='--cc-pipeline-tiling-factor=1'", "inf2")
    assert flags[0] == "--tensorizer-options=--cc-pipeline-tiling-factor=1"


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
        add_user_flags(("--auto-cast=none", "-O1", "--lnc=2"), user, "trn2")
