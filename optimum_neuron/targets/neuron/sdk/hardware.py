# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron hardware as data: chips, instances, and the groups of cores that share a model. Imports no torch.

Chips and instances are from the AWS Neuron SDK documentation (about-neuron/arch/neuron-hardware, release 2.32), except
trn2.3xlarge, which is from Amazon's list of instance types; widths and clocks of vector engines are from its guides for NKI
(nki/guides/architecture). A core here is a logical NeuronCore, on which one rank of a tensor parallel group runs.
Trainium2 and Trainium3 join two physical cores to one by default (LNC 2); NEURON_LOGICAL_NC_CONFIG=1 leaves them apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from ....config import NEURON_TARGETS


GIB = 1 << 30
MIB = 1 << 20
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


@dataclass(frozen=True, eq=False)
class Chip:
    """One accelerator chip, equal to itself alone; figures are its peaks, all cores together.

    Attributes:
        cores: logical NeuronCores, of `physical_cores` each.
        hbm: bytes of device memory; each logical core has its own equal share.
        bandwidth: bytes per second between the memory and the cores.
        sbuf: bytes of on-chip memory (SBUF) of a physical core, where what one instruction leaves may wait for the next.
        teraflops: of dense matrix products of 16-bit types and of float32.
        vector: of a physical core's vector engine the clock in GHz, and the numbers per cycle of 16 bits and of others.
    """

    name: str
    cores: int
    physical_cores: int
    hbm: int
    bandwidth: float
    sbuf: int
    teraflops: tuple[float, float]
    vector: tuple[float, int, int]

    @property
    def flops(self) -> dict[str, float]:
        """Return floating point operations per second of dense matrix products, by torch's name of the type."""
        half, full = (each * 1e12 for each in self.teraflops)
        return {"bfloat16": half, "float16": half, "float32": full}

    @property
    def core_sbuf(self) -> int:
        return self.sbuf * self.physical_cores

    @property
    def core_hbm(self) -> int:
        return self.hbm // self.cores

    @property
    def core_bandwidth(self) -> float:
        return self.bandwidth / self.cores

    def core_flops(self, dtype: str) -> float:
        """Return operations per second per logical core."""
        return self.flops[dtype] / self.cores

    def vector_seconds(self, elements: Mapping[int, int]) -> float:
        """Return the time of a logical core's vector engines for elementwise operators and reductions, one after the other.

        `elements` says how many, by the bytes of one; types of a byte take as long as those of two.
        """
        clock, *widths = self.vector
        return sum(count / (self.physical_cores * clock * 1e9 * widths[size > 2]) for size, count in elements.items())

    def core_seconds(self, moved: float, flops: Mapping[str, float]) -> float:
        """Return the roofline of a logical core, with overlapping memory and products.

        `moved` are bytes read and written, `flops` operations of products by the type of their operands.
        """
        products = sum(count / self.core_flops(dtype) for dtype, count in flops.items())
        return max(moved / self.core_bandwidth, products)


# The documentation gives GiB per second for the first generation of these chips and TB per second for the later ones.
CHIPS = {
    "inf2": Chip("Inferentia2", 2, 1, 32 * GIB, 820 * GIB, 24 * MIB, (190, 47.5), (1.12, 128, 128)),
    "trn1": Chip("Trainium1", 2, 1, 32 * GIB, 820 * GIB, 24 * MIB, (190, 47.5), (1.12, 128, 128)),
    "trn2": Chip("Trainium2", 4, 2, 96 * GIB, 2.9e12, 28 * MIB, (667, 181), (0.96, 512, 256)),
    "trn3": Chip("Trainium3", 4, 2, 144 * GIB, 4.9e12, 32 * MIB, (671, 183), (1.2, 512, 256)),
}
assert tuple(CHIPS) == NEURON_TARGETS


def has_paired_cores(target: str) -> bool:
    """Return whether a logical core of a target may be two physical ones."""
    return CHIPS[target].physical_cores > 1


def logical_core_size(target: str) -> int:
    """Return physical cores per logical one (LNC): those of NEURON_LOGICAL_NC_CONFIG, or as many as a target joins.

    Raise ValueError where the target does not allow the variable's value.
    """
    most, given = CHIPS[target].physical_cores, os.environ.get(LNC_VARIABLE)
    if given is None:
        return most
    sizes = [str(size) for size in range(1, most + 1)]
    if given not in sizes:
        raise ValueError(
            f"{LNC_VARIABLE}={given}, but a logical core of {target} has {' or '.join(sizes)} physical cores; unset it or "
            f"set it to {most}"
        )
    return int(given)


def chip_of(target: str, lnc: int | None = None) -> Chip:
    """Return a target's chip, with `lnc` physical cores per logical one; None: as `logical_core_size` says.

    For `hlo`, which is no chip, it is the one with the least on-chip memory. Where no cores are joined, the variable says nothing.
    """
    if target not in CHIPS:
        return min(CHIPS.values(), key=lambda chip: chip.core_sbuf)
    return _regroup(CHIPS[target], (lnc or logical_core_size(target)) if has_paired_cores(target) else 1)


@cache
def _regroup(chip: Chip, lnc: int) -> Chip:
    cores = chip.cores * chip.physical_cores // lnc
    return chip if lnc == chip.physical_cores else replace(chip, cores=cores, physical_cores=lnc)


@dataclass(frozen=True)
class Instance:
    """A host; a tensor parallel group stays inside one. Hosts of an UltraServer count one by one."""

    name: str
    target: str
    chips: int

    @property
    def size(self) -> str:
        """Return the part of the name that differs between instances of a target."""
        return self.name.removesuffix(" server").replace(" ", ".").partition(".")[2]

    @property
    def cores(self) -> int:
        return self.chips * chip_of(self.target).cores

    @property
    def hbm(self) -> int:
        return self.chips * CHIPS[self.target].hbm

    @property
    def parallel_sizes(self) -> tuple[int, ...]:
        """Return the tensor parallel sizes that its topology takes."""
        return tuple(size for size in parallel_sizes(self.target) if size <= self.cores)


# By target, smallest first. The servers of Trn3 UltraServers have no instance name in the documentation.
INSTANCES = (
    Instance("inf2.xlarge", "inf2", 1),
    Instance("inf2.8xlarge", "inf2", 1),
    Instance("inf2.24xlarge", "inf2", 6),
    Instance("inf2.48xlarge", "inf2", 12),
    Instance("trn1.2xlarge", "trn1", 1),
    Instance("trn1.32xlarge", "trn1", 16),
    Instance("trn1n.32xlarge", "trn1", 16),
    Instance("trn2.3xlarge", "trn2", 1),
    Instance("trn2.48xlarge", "trn2", 16),
    Instance("trn2u.48xlarge", "trn2", 16),
    Instance("trn3 Gen2 server", "trn3", 4),
    Instance("trn3 Gen1 server", "trn3", 16),
)

# What the runtime connects, in logical cores as chips join them. Neuron SDK documentation of release 2.32:
# - inf2, trn1, trn2: libraries/nxd-inference/developer_guides/feature-guide.rst, "Tensor-parallelism". Older pages differ:
#   archive/transformers-neuronx lists no 16 on trn1, about-neuron/transformers lists 12 on inf2, all cores of an inf2.24xlarge.
#   Hugging Face publishes runs on these (docs/optimum-neuron/benchmarks/inferentia-mistral-small).
# - trn3: no page lists its sizes. vllm-neuron/docs/model-recipes/qwen3-embedding-8b.md was validated with 2 to 32 there, and
#   guides/features-guide.md serves gpt-oss in a format that trn3 alone has with 64; a single core needs no connection.
PARALLEL_SIZES = {
    "inf2": (1, 2, 4, 8, 12, 24),
    "trn1": (1, 2, 8, 16, 32),
    "trn2": (1, 2, 4, 8, 16, 32, 64),
    "trn3": (1, 2, 4, 8, 16, 32, 64),
}
assert tuple(PARALLEL_SIZES) == NEURON_TARGETS


def parallel_sizes(target: str) -> tuple[int, ...]:
    """Return the tensor parallel sizes of a target; where paired cores are apart, twice the largest one, too."""
    sizes, apart = PARALLEL_SIZES[target], CHIPS[target].physical_cores // chip_of(target).physical_cores
    return sizes if apart == 1 else (*sizes, apart * sizes[-1])


def hosts_of(target: str, parallel_size: int = 1) -> tuple[Instance, ...]:
    """Return the hosts of a target that take a tensor parallel size, smallest first."""
    return tuple(host for host in INSTANCES if host.target == target and parallel_size in host.parallel_sizes)


def check_parallel_size(target: str, size: int) -> None:
    """Raise ValueError where no host of a target takes a tensor parallel size; the message names the nearest that one does."""
    sizes = parallel_sizes(target) if target in PARALLEL_SIZES else (size,)
    if size in sizes:
        return
    below, above = [one for one in sizes if one < size], [one for one in sizes if one > size]
    nearest = " or ".join(map(str, below[-1:] + above[:1]))
    raise ValueError(
        f"tensor_parallel_size={size} is no group of cores that {target} connects, which are {', '.join(map(str, sizes))}; "
        f"use {nearest}"
    )
