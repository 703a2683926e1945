# SPDX-License-Identifier: Apache-2.0
"""How many CPUs a process may use, in made-up systems: control groups of both versions, affinities, cores of several threads."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.kernels.host import machine as cores
from optimum_neuron.kernels.host import processes


V1_LINE = "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_LINE = "26 20 0:23 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
System = Callable[[dict[str, str]], None]
NO_GROUPS = "22 1 0:5 / /proc rw - proc proc rw\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes a system of these files."""
    monkeypatch.setattr(cores, "_ROOT", tmp_path)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    return write


def version_1(path: str, mounted: str = "/", **quotas: int) -> dict[str, str]:
    """`quotas`: microseconds of 100 ms by folder below the mount, with _ for / ; the mount itself is called top."""
    files = {
        "proc/self/cgroup": f"5:memory:/elsewhere\n4:cpu,cpuacct:{path}\n3:cpuset:/elsewhere\n1:name=systemd:/\n0::/\n",
        "proc/self/mountinfo": NO_GROUPS + V1_LINE.format(root=mounted),
    }
    for name, quota in quotas.items():
        folder = f"sys/fs/cgroup/cpu,cpuacct/{'' if name == 'top' else name.replace('_', '/')}"
        files |= {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    return files


def version_2(path: str, mounted: str = "/", **quotas: str) -> dict[str, str]:
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": NO_GROUPS + V2_LINE.format(root=mounted)}
    for name, quota in quotas.items():
        files[f"sys/fs/cgroup/{'' if name == 'top' else name.replace('_', '/')}/cpu.max"] = f"{quota}\n"
    return files


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (version_2("/a/b", a_b="400000 100000"), 4),
        (version_2("/a/b", a_b="50000 100000"), 0),
        (version_2("/a/b", a_b="75000 25000"), 3),
        (version_2("/a/b", a_b="400000 100000", a="200000 100000"), 2),
        (version_2("/a/b", a_b="max 100000", a="max 100000", top="300000 100000"), 3),
        (version_2("/a/b", a_b="400000 100000", a_c="100000 100000"), 4),
        (version_2("/", top="200000 100000"), 2),
        (version_2("/docker/1/a", "/docker/1", a="200000 100000"), 2),
        (version_2("/outside", "/docker/1", top="200000 100000"), 2),
        (version_2("/../other", other="100000 100000", top="200000 100000"), 2),
        (version_2("/a b", "/", **{"a b": "200000 100000"}), 2),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": "26 20 - cgroup2 cgroup2 rw\n"}, None),
        (version_1("/a/b", a_b=250000), 2),
        (version_1("/a/b", a_b=-1, a=300000, top=-1), 3),
        (version_1("/docker/1", "/docker/1", top=150000), 1),
        (version_2("/a", a="200000"), None),
        (version_2("/a", a="200000 0"), None),
        (version_2("/a", a="-5 100000"), None),
    ],
)  # fmt: skip
def test_the_smallest_quota_of_all_groups_around_a_process_counts(
    files: dict[str, str], quota: int | None, system: System
) -> None:
    system(files)
    assert cores.quota() == quota


def test_groups_of_both_versions_and_mount_points_with_a_space_count(system: System) -> None:
    """As where the controller of the CPU is still in version 1, and other things are counted in version 2."""
    files = version_1("/a", a=300000)
    files["proc/self/mountinfo"] += V2_LINE.format(root="/").replace("/sys/fs/cgroup", "/my\\040groups")
    files["proc/self/cgroup"] = files["proc/self/cgroup"].replace("0::/", "0::/b")
    system(files | {"my groups/b/cpu.max": "200000 100000"})
    assert cores.quota() == 2


def test_threads_of_one_core_count_once(system: System) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{s}\n" for n, s in siblings.items()}
    system(files)
    assert cores.physical_cores(siblings) == 3
    assert cores.physical_cores({0, 1, 5}) == 2
    assert cores.physical_cores({2, 9, 10}) == 3  # of 9 and 10 nothing is known


def test_affinity_cores_and_quota_together(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # a system without affinities is taken whole
        patch.delattr(os, "sched_getaffinity", raising=False)
        for count, expected in ((6, 6), (None, 1)):
            patch.setattr(os, "cpu_count", lambda count=count: count)
            assert cores.usable_cpus() == cores.usable_cores() == expected
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {name.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5}, raising=False)
    for quota, cpus, physical in (("max", 4, 2), ("300000", 3, 2), ("100000", 1, 1), ("1000", 1, 1)):
        system(siblings | version_2("/a", a=f"{quota} 100000"))
        assert cores.usable_cpus() == processes.parallel_jobs(100, 1) == cpus
        assert cores.usable_cores() == physical


# Lines as the system writes them, and what no system writes.
_word = st.one_of(st.sampled_from(["/", "/a", "/a/b", "cpu", "max", "0", "-1", "cgroup", "cgroup2", "-", "..", "\\040", "\\777"]), st.text(max_size=4))  # fmt: skip
_text = st.one_of(
    st.lists(_word, max_size=4).map(":".join),
    st.lists(st.lists(_word, max_size=12).map(" ".join), max_size=4).map("\n".join),
    st.builds(lambda path: version_2(path)["proc/self/cgroup"], _word),
    st.builds(lambda path, mounted: version_2(path, mounted)["proc/self/mountinfo"], _word, _word),
    st.builds("{} {}".format, st.integers(), st.integers()),
    st.just("9" * 5000),
)
_FILES = ("proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/a/cpu.max")


@examples(150)
@given(st.lists(_text, min_size=4, max_size=4), st.binary(max_size=8), st.sets(st.integers(), min_size=1))
def test_whatever_files_say_there_is_a_cpu_to_compute_with(texts: list[str], broken: bytes, cpus: set[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder)
        for name, text in zip(_FILES, texts, strict=True):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text.encode("utf-8", "surrogatepass") + broken)
        patch.setattr(cores, "_ROOT", root)
        patch.setattr(os, "sched_getaffinity", lambda process: cpus, raising=False)
        assert 1 <= cores.usable_cores() <= len(cpus)
        assert 1 <= cores.usable_cpus() <= len(cpus)


def test_threads_are_torchs_number_or_the_variables_or_those_of_all_usable_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 5)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 7))
    assert cores.count_threads() == 7
    monkeypatch.delitem(sys.modules, "torch")
    for value, expected in (("3", 3), ("4,2", 4), ("", 5), ("0", 5), ("many", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        cores._count_own_threads.cache_clear()
        assert cores.count_threads() == expected
    cores._count_own_threads.cache_clear()
