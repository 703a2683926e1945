# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron hardware as data: chips, instances, and what published runs reached of it. Imports no torch.

Chips and instances are from the AWS Neuron SDK documentation (about-neuron/arch/neuron-hardware, release 2.32), except
trn2.3xlarge, which is from Amazon's list of instance types. A core here is a logical NeuronCore: what one rank of a tensor
parallel group runs on. Trainium2 and Trainium3 join two physical cores to one by default (LNC 2), and so does this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....config import NEURON_TARGETS


GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip; figures are its peaks, all cores together.

    Attributes:
        cores: logical NeuronCores.
        physical_cores: NeuronCores that make up one logical core.
        hbm: bytes of device memory; each logical core has its own equal share.
        bandwidth: bytes per second between the memory and the cores.
        flops: floating point operations per second of dense matrix products, by torch's name of the type.
    """

    name: str
    cores: int
    physical_cores: int
    hbm: int
    bandwidth: float
    flops: dict[str, float]

    @property
    def core_hbm(self) -> int:
        """Bytes of device memory per logical core."""
        return self.hbm // self.cores

    @property
    def core_bandwidth(self) -> float:
        """Bytes per second per logical core, when all cores read."""
        return self.bandwidth / self.cores

    def core_flops(self, dtype: str) -> float:
        """Operations per second per logical core."""
        return self.flops[dtype] / self.cores


def _chip(
    name: str, cores: int, physical_cores: int, hbm_gib: int, bandwidth: float, bf16_tf: float, fp32_tf: float
) -> Chip:
    flops = {"bfloat16": bf16_tf * 1e12, "float16": bf16_tf * 1e12, "float32": fp32_tf * 1e12}
    return Chip(
        name=name,
        cores=cores,
        physical_cores=physical_cores,
        hbm=hbm_gib * GIB,
        bandwidth=bandwidth,
        flops=flops,
    )


# The documentation gives GiB per second for the first generation of these chips and TB per second for the later ones.
CHIPS = {
    "inf2": _chip("Inferentia2", 2, 1, 32, 820 * GIB, 190, 47.5),
    "trn1": _chip("Trainium1", 2, 1, 32, 820 * GIB, 190, 47.5),
    "trn2": _chip("Trainium2", 4, 2, 96, 2.9e12, 667, 181),
    "trn3": _chip("Trainium3", 4, 2, 144, 4.9e12, 671, 183),
}
assert tuple(CHIPS) == NEURON_TARGETS


@dataclass(frozen=True)
class Instance:
    """A host; a tensor parallel group stays inside one. Hosts of an UltraServer count one by one."""

    name: str
    target: str
    chips: int

    @property
    def size(self) -> str:
        """What tells it from others of its target."""
        return self.name.removesuffix(" server").replace(" ", ".").partition(".")[2]

    @property
    def cores(self) -> int:
        """Logical NeuronCores of the host."""
        return self.chips * CHIPS[self.target].cores


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


def instances_of(target: str) -> tuple[Instance, ...]:
    """Hosts of a target, smallest first."""
    return tuple(instance for instance in INSTANCES if instance.target == target)


def parallel_sizes(target: str) -> tuple[int, ...]:
    """Tensor parallel sizes worth a look: the powers of two that some host has cores for, and whole hosts."""
    hosts = {instance.cores for instance in instances_of(target)}
    return tuple(sorted(hosts | {1 << power for power in range(max(hosts).bit_length())}))


def check_parallel_size(target: str, size: int) -> None:
    """Raises ValueError where no host of a target has `size` cores."""
    largest = max(instances_of(target), key=lambda instance: instance.cores)
    if size > largest.cores:
        raise ValueError(
            f"tensor_parallel_size={size} needs as many cores in one host, and the largest of {target}, {largest.name}, has "
            f"{largest.cores}; use {largest.cores} or less"
        )


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """Step times that others measured, one request at a time, in graphs of fixed shapes without context buckets.

    Attributes:
        decode_ms: a token generation step of all `batch_size` rows over the whole `sequence_length`.
        chunk_ms: a chunked prefill step of `chunk_size` tokens; None where none was published.
    """

    model: str
    target: str
    tensor_parallel_size: int
    batch_size: int
    sequence_length: int
    decode_ms: float
    chunk_size: int | None = None
    chunk_ms: float | None = None


# From the benchmark folder of huggingface/optimum-neuron, all in bfloat16. Its pull request 1086 (inf2.48xlarge) took 296 ms
# for the two chunks of a 1500-token prompt. The last one does not tell its sequence length: 4096 is optimum-neuron's default,
# and at 2 rows the cache is 3% of what a step reads.
LLAMA_8B_INF2 = PublishedRun(
    model="Llama-3.1-8B",
    target="inf2",
    tensor_parallel_size=8,
    batch_size=32,
    sequence_length=4096,
    decode_ms=24.6,
    chunk_size=1024,
    chunk_ms=148.0,
)
LLAMA_8B_TRN2 = PublishedRun(
    model="Llama-3.1-8B",
    target="trn2",
    tensor_parallel_size=4,
    batch_size=32,
    sequence_length=4096,
    decode_ms=22.1,
)
QWEN3_32B_TRN2 = PublishedRun(
    model="Qwen3-32B",
    target="trn2",
    tensor_parallel_size=4,
    batch_size=2,
    sequence_length=4096,
    decode_ms=32.1,
)


@dataclass(frozen=True)
class Efficiency:
    """Which share of a chip's peaks steps reach.

    Attributes:
        weights: of the memory bandwidth, while weights are read.
        cache: of the memory bandwidth, while the KV cache is read.
        flops: of the matrix products of the type in use.
        cores: the largest group of cores that was measured. What more of them lose to collectives is not known.
        source: where the shares come from.
    """

    weights: float
    cache: float
    flops: float
    cores: int
    source: str


# Solved from the published runs, so that an estimate of each run gives its published time. Two decode times of trn2, one
# bound by weights and one also by the cache, give both of its shares. inf2 has one decode time: the share for weights is
# trn2's there. Graphs of this project on hardware are not measured yet; these were optimum-neuron's, with collectives and
# launches, which hence are inside the shares.
_TRN2_DECODE = "decode: Llama-3.1-8B (22.1 ms) and Qwen3-32B (32.1 ms) on 4 cores of trn2"
_INF2_CHUNK = "prefill: Llama-3.1-8B on 8 cores of inf2 (148 ms per chunk of 1024)"
_V2 = Efficiency(
    0.730, 0.260, 0.147, 8, f"decode: Llama-3.1-8B on 8 cores of inf2 (24.6 ms), weights as on trn2; {_INF2_CHUNK}"
)
_V3 = Efficiency(0.730, 0.395, 0.147, 4, f"{_TRN2_DECODE}; {_INF2_CHUNK}")
EFFICIENCIES = {"inf2": _V2, "trn1": _V2, "trn2": _V3, "trn3": _V3}
