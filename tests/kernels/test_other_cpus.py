# SPDX-License-Identifier: Apache-2.0
"""Machines with other instruction sets, and the variable that makes this one play such a machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Opener, artifact_runner, export_tiny, generate, random_tokens
from kernel_calls import NAMES

from optimum_neuron.generate import NeuronModelForCausalLM
from optimum_neuron.kernels.host import instruction_sets as host
from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE
from optimum_neuron.targets.cpu.native_library import load_kernels


@pytest.fixture
def reloaded() -> Iterator[None]:
    """Lets a test choose the kernels, which a process otherwise chooses once."""
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def older_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX2 and no more, whichever this one is."""
    has = next(each.needs for each in host._X86_64 if each.name == "avx2")
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host, "_machine_flags", lambda: has | {"sse4_2", "fpu"})
    monkeypatch.delenv(CPU_VARIABLE, raising=False)


@pytest.mark.usefixtures("older_cpu")
def test_the_best_instruction_set_of_a_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in host.list_instruction_sets()] == ["avx2", "baseline"]
    assert host.choose_instruction_set().name == "avx2"
    monkeypatch.setenv(CPU_VARIABLE, "baseline")
    assert host.choose_instruction_set().name == "baseline"
    monkeypatch.setenv(CPU_VARIABLE, "")
    assert host.choose_instruction_set().name == "avx2"


@pytest.mark.parametrize(("machine", "name"), [("aarch64", "neon"), ("x86_64", "baseline"), ("riscv64", "baseline")])
def test_every_machine_has_an_instruction_set(machine: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host, "_machine_flags", frozenset)
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert host.choose_instruction_set().name == name


def test_what_a_machine_has_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "_CPUINFO", cpuinfo)
    assert host._machine_flags() == frozenset()
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: flags of \xff\nflags\t\t: fpu avx2\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert host._machine_flags() == {"fpu", "avx2"}
    cpuinfo.write_text("processor : 0\nFeatures : asimd bf16\n")
    assert host._machine_flags() == {"asimd", "bf16"}


@pytest.mark.parametrize(("flags", "names"), [("fp asimd evtstrm crc32", ["neon"]), ("bf16", ["neon"]), (None, [])])
def test_bfloat16_of_an_arm_cpu_is_used_where_it_has_all_that_its_compiler_assumes(
    flags: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = next(each.needs for each in host._AARCH64 if each.name == "neon_bf16")
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(host, "_machine_flags", lambda: needs if flags is None else frozenset(flags.split()))
    assert [each.name for each in host.list_instruction_sets()] == (names or ["neon_bf16", "neon"])


@pytest.mark.parametrize(
    ("cpu", "vectors", "best"),
    [
        ("bf16 asimddp sve", 32, "neon_bf16"),
        ("sve", 64, "sve512"),
        ("sve", 32, "sve256"),
        ("sve", 16, "neon"),
        ("", 64, "neon"),
    ],
)
def test_long_vectors_of_an_arm_cpu_are_used_at_the_length_that_linux_gives(
    cpu: str, vectors: int, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(host, "_machine_flags", lambda: host._ARMV8_2 | frozenset(cpu.split()))
    monkeypatch.setattr(host, "_sve_bytes", lambda: vectors)
    names = [each.name for each in host.list_instruction_sets()]
    assert names[0] == best
    assert ({"sve256", "sve512"} & set(names)) <= {f"sve{8 * vectors}"}


@pytest.mark.parametrize("given", [True, False])
def test_tile_registers_are_used_where_linux_gives_them(
    given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def syscall(*numbers: ctypes.c_long) -> int:
        asked.append([each.value for each in numbers])
        return 0 if given else -1

    needs = next(each.needs for each in host._X86_64 if each.name == "amx_bf16")
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host, "_syscall", syscall)
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    host._CPUINFO.write_text(f"flags : fpu {' '.join(needs)}\n")
    assert host.choose_instruction_set().name == ("amx_bf16" if given else "avx512_bf16")
    assert asked == [[158, 0x1023, 18]]  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    monkeypatch.setenv(CPU_VARIABLE, "amx_bf16")
    if not given:
        with pytest.raises(ValueError, match="is not an instruction set of this machine; choose one of avx512_bf16"):
            host.choose_instruction_set()
    asked.clear()
    monkeypatch.delenv(CPU_VARIABLE)
    host._CPUINFO.write_text(f"flags : fpu {' '.join(needs - {'amx_bf16'})}\n")
    assert host.choose_instruction_set().name == "avx512_bf16"
    assert not asked


_GETPID = {"x86_64": 39, "aarch64": 172}


@pytest.mark.skipif(sys.platform != "linux" or host.platform.machine() not in _GETPID, reason="calls Linux by number")
def test_a_system_call_answers_as_linux_has_it() -> None:
    assert host._syscall(ctypes.c_long(_GETPID[host.platform.machine()])) == os.getpid()
    assert host._syscall(ctypes.c_long(1 << 20)) == -1


@pytest.mark.parametrize(("bf16", "best"), [(1, "neon_bf16"), (0, "neon")])
def test_a_mac_is_asked_for_what_it_has(bf16: int, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host, "_sysctl", {b"hw.optional.arm.FEAT_BF16": bf16}.__getitem__)
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert host.choose_instruction_set().name == best
    assert not [each.name for each in host.list_platform_sets() if "sve" in each.needs]


@pytest.mark.usefixtures("older_cpu", "reloaded")
@pytest.mark.parametrize("name", ["sse9", "avx512", "AVX2", " avx2"])
def test_an_instruction_set_that_cannot_be_had_is_refused_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_VARIABLE, name)
    for choose in (host.choose_instruction_set, load_kernels):
        with pytest.raises(ValueError) as raised:
            choose()
        assert str(raised.value) == (
            f"OPTIMUM_NEURON_CPU={name!r} is not an instruction set of this machine; choose one of avx2, baseline, or "
            f"unset it"
        )


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


@pytest.mark.skipif(len(NAMES) < 2, reason="one instruction set")
@pytest.mark.slow
def test_an_artifact_runs_on_machines_with_other_instruction_sets(
    open_runner: Opener, reloaded: None, cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = cpu_artifact("llama"), random_tokens(21)
    expected = generate(open_runner("llama"), prompt, 6)[0]
    for name in NAMES[1:]:
        monkeypatch.setenv(CPU_VARIABLE, name)
        load_kernels.cache_clear()
        assert generate(artifact_runner(path), prompt, 6)[0] == expected, name
