# SPDX-License-Identifier: Apache-2.0
"""The compiler's options, by target and kind of graph, and those that users add."""

from __future__ import annotations

import pytest

from optimum_neuron.targets.neuron.sdk.flags import add_user_flags, compiler_flags, logical_core_size


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
    flags = compiler_flags(target, kind, lnc=logical_core_size(target, None), compiler_version=version)
    assert flags == ("--model-type=transformer", "--auto-cast=none", *expected.split())


def test_logical_core_size_follows_the_environment_where_the_target_allows_it() -> None:
    assert logical_core_size("trn2", "1") == 1
    assert logical_core_size("trn1", "1") == 1
    with pytest.raises(ValueError, match=r"NEURON_LOGICAL_NC_CONFIG=2, but a logical core of trn1 has 1 physical"):
        logical_core_size("trn1", "2")
    with pytest.raises(ValueError, match=r"=3, but a logical core of trn2 has 1 or 2 physical cores; .* set it to 2"):
        logical_core_size("trn2", "3")


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", "--auto-cast=none -O1 --lnc=2"),
        ("--verbose 35 --internal-x='a b'", "--auto-cast=none -O1 --lnc=2 --verbose 35 --internal-x=a b"),
        ("--optlevel 3", "--auto-cast=none -O3 --lnc=2"),
        ("-lnc 2 --target=trn2", "--auto-cast=none -O1 --lnc=2"),
        ("--enable-fast-context-switch", "--auto-cast=none -O1 --lnc=2 --enable-fast-context-switch"),
    ],
)
def test_user_flags_are_added_or_replace_what_only_changes_speed(user: str, expected: str) -> None:
    assert " ".join(add_user_flags(("--auto-cast=none", "-O1", "--lnc=2"), user, "trn2")) == expected


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
