# SPDX-License-Identifier: Apache-2.0
"""Machines with other instruction sets, and the variable that makes this one play such a machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from helpers import export_tiny

from optimum_neuron.generate.model import NeuronModelForCausalLM
from optimum_neuron.kernels.host import instruction_sets as host
from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE
from optimum_neuron.targets.cpu.native_library import load_kernels


Machine = Callable[..., list[str]]


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Lets a test choose the kernels, which a process otherwise chooses once."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Plays a machine, and names the instruction sets that it has, the best first."""
    monkeypatch.delenv(CPU_VARIABLE, raising=False)

    def play(kind: str, flags: Iterable[str], platform: str = "linux") -> list[str]:
        monkeypatch.setattr(host.platform, "machine", lambda: kind)
        monkeypatch.setattr(host.sys, "platform", platform)
        if platform == "linux":
            monkeypatch.setattr(host, "_machine_flags", lambda: frozenset(flags))
        return [each.name for each in host.list_instruction_sets()]

    return play


def needs(name: str) -> frozenset[str]:
    return next(each.needs for each in (*host._X86_64, *host._AARCH64) if each.name == name)


@pytest.fixture
def older_cpu(machine: Machine) -> None:
    """A CPU with AVX2 and no more, whichever this one is."""
    assert machine("x86_64", needs("avx2") | {"sse4_2", "fpu"}) == ["avx2", "baseline"]


@pytest.mark.parametrize(
    ("kind", "flags", "vectors", "names"),
    [
        ("aarch64", "", 0, ["neon"]),
        ("x86_64", "", 0, ["baseline"]),
        # Products of bfloat16 are used where a CPU has all that the compiler assumes with them.
        ("aarch64", "fp asimd evtstrm crc32", 0, ["neon"]),
        ("aarch64", "bf16", 0, ["neon"]),
        ("aarch64", " ".join(sorted(needs("neon_bf16"))), 0, ["neon_bf16", "neon"]),
        # Vectors are used at the length that Linux gives.
        ("aarch64", "v8.2 bf16 asimddp sve", 32, ["neon_bf16", "sve256", "neon"]),
        ("aarch64", "v8.2 sve", 64, ["sve512", "neon"]),
        ("aarch64", "v8.2 sve", 16, ["neon"]),
        ("aarch64", "v8.2", 64, ["neon"]),
    ],
)
def test_every_machine_has_the_instruction_sets_that_its_flags_allow(
    kind: str, flags: str, vectors: int, names: list[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_sve_bytes", lambda: vectors)
    assert machine(kind, flags.replace("v8.2", " ".join(host._ARMV8_2)).split()) == names


@pytest.mark.parametrize(("bf16", "names"), [(1, ["neon_bf16", "neon"]), (0, ["neon"])])
def test_a_mac_is_asked_for_what_it_has(
    bf16: int, names: list[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_sysctl", {b"hw.optional.arm.FEAT_BF16": bf16}.__getitem__)
    assert machine("arm64", (), "darwin") == names
    assert not [each.name for each in host.list_platform_sets() if "sve" in each.needs]


def test_what_a_machine_has_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "_CPUINFO", cpuinfo)
    assert host._machine_flags() == frozenset()
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: flags of \xff\nflags\t\t: fpu avx2\nprocessor\t: 1\nflags\t: fpu\n"
    )
    assert host._machine_flags() == {"fpu", "avx2"}
    cpuinfo.write_text("processor : 0\nFeatures : asimd bf16\n")
    assert host._machine_flags() == {"asimd", "bf16"}


@pytest.mark.parametrize("given", [True, False])
def test_tile_registers_are_used_where_linux_gives_them(
    given: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def syscall(*numbers: ctypes.c_long) -> int:
        asked.append([each.value for each in numbers])
        return 0 if given else -1

    monkeypatch.setattr(host, "_syscall", syscall)
    assert machine("x86_64", needs("amx_bf16"))[0] == ("amx_bf16" if given else "avx512_bf16")
    assert asked == [[158, 0x1023, 18]]  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    monkeypatch.setenv(CPU_VARIABLE, "amx_bf16")
    if not given:
        with pytest.raises(ValueError, match="is not an instruction set of this machine; choose one of avx512_bf16"):
            host.choose_instruction_set()
    asked.clear()
    assert machine("x86_64", needs("amx_bf16") - {"amx_bf16"})[0] == "avx512_bf16"
    assert not asked


_GETPID = {"x86_64": 39, "aarch64": 172}


@pytest.mark.skipif(sys.platform != "linux" or host.platform.machine() not in _GETPID, reason="calls Linux by number")
def test_a_system_call_answers_as_linux_has_it() -> None:
    assert host._syscall(ctypes.c_long(_GETPID[host.platform.machine()])) == os.getpid()
    assert host._syscall(ctypes.c_long(1 << 20)) == -1


@pytest.mark.usefixtures("older_cpu", "reloaded")
def test_the_best_instruction_set_or_the_named_one_is_used_and_none_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for asked, name in (("baseline", "baseline"), ("", "avx2")):
        monkeypatch.setenv(CPU_VARIABLE, asked)
        assert host.choose_instruction_set().name == name
    for name in ("sse9", "avx512", "AVX2", " avx2"):
        monkeypatch.setenv(CPU_VARIABLE, name)
        words = f"OPTIMUM_NEURON_CPU='{name}' is not an instruction set of this machine; choose one of avx2, baseline, or unset it"
        for choose in (host.choose_instruction_set, load_kernels):
            with pytest.raises(ValueError, match=f"^{words}$"):
                choose()


@pytest.mark.usefixtures("reloaded")
def test_an_instruction_set_that_cannot_be_had_leaves_no_export_and_blames_no_artifact(
    cpu_artifact: Callable[[str], Path], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cpu_artifact("llama")
    load_kernels.cache_clear()
    monkeypatch.setenv(CPU_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=r"^OPTIMUM_NEURON_CPU='sse9' is not an instruction set .* or unset it$"):
        NeuronModelForCausalLM.from_pretrained(path)
    with pytest.raises(ValueError, match="OPTIMUM_NEURON_CPU='sse9' is not an instruction set of this machine"):
        export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu")
    assert not (tmp_path / "artifact").exists()
