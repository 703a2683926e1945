# SPDX-License-Identifier: Apache-2.0
"""Compiles step graphs in a process of its own: reads requests as JSON lines, answers each with a JSON line.

A process per compilation thread, because torch.export and Inductor hold the interpreter lock. It maps the weights that
the export has already written, so that no process has a copy of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ...artifacts.artifact import WEIGHTS_NAME
from ...artifacts.skeleton import assign, empty_model
from ...config import NeuronConfig
from ...graphs.kv_cache import KVCache
from ...graphs.ops import DEFAULT_OPS, StepOps
from ...graphs.program import export_graph
from ...graphs.spec import GraphSpec, ModelSpec, state_specs
from . import kernels
from .attention import attend_cache_on_cpu, is_taken
from .experts import grouped_experts, use_natural_layout
from .package import Facts, describe, open_package
from .rewrite import pad_linear_rows, use_linear_kernel


OWN_OPS = StepOps(attend_cache=attend_cache_on_cpu, reads_visible=is_taken, experts=grouped_experts)
# Weights and KV state stay outside the package and are bound at load: one copy for all graphs.
INDUCTOR_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,  # else the code has this machine's number of cores built in
}
# With one token there is nothing but a sum's terms to share out: several threads would round it unlike other graphs do.
ONE_TOKEN_OPTIONS = INDUCTOR_OPTIONS | {"cpp.threads": 1, "cpp.dynamic_threads": False}


def main() -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # compilers print: only answers may reach the parent's pipe
    job = json.loads(sys.stdin.readline())
    own_kernels = job["kernel_library"] is not None
    if own_kernels:
        kernels.load(Path(job["kernel_library"]), kernels.namespace())
    model, cache = _load(job)
    # What is loaded stays, and graphs are many small objects: looking for garbage among them as often as by default takes long.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    config, spec = NeuronConfig.from_dict(job["config"]), ModelSpec.from_dict(job["model"])
    used = (kernels.namespace(), Path(job["kernel_library"])) if own_kernels else (None, None)
    facts = Facts.of(config, spec, *used)
    for line in sys.stdin:
        _answer(answers, _compile(model, cache, json.loads(line), facts))


def _load(job: dict[str, Any]) -> tuple[nn.Module, KVCache]:
    folder, config = Path(job["folder"]), NeuronConfig.from_dict(job["config"])
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors |= {alias: tensors[name] for alias, name in job["tied_weights"].items()}
    model = empty_model(folder, config.dtype, trust_remote_code=job["trust_remote_code"])
    use_natural_layout(model, tensors)
    assign(model, tensors)
    return model, KVCache(state_specs(config, ModelSpec.from_dict(job["model"])))


def _compile(model: nn.Module, cache: KVCache, request: dict[str, Any], facts: Facts) -> dict[str, Any]:
    try:
        spec, output = GraphSpec(**request["graph"]), Path(request["output"])
        program = export_graph(model, cache, spec, OWN_OPS if facts.namespace else DEFAULT_OPS)
        (use_linear_kernel if facts.namespace else pad_linear_rows)(program)
        # What torch.export lifted out of the model's code as literal tensors belongs to this graph alone.
        constants = {
            name: value for name, value in program.constants.items() if not name.startswith(("model.", "kv_cache."))
        }
        options = ONE_TOKEN_OPTIONS if _tokens(spec) == 1 else INDUCTOR_OPTIONS
        metadata = describe(spec, facts, {**program.state_dict, **program.constants})
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(output), inductor_configs=options | {"aot_inductor.metadata": metadata}
        )
        open_package(output)  # what does not load is not kept
        if constants:
            save_file(
                {name: value.contiguous() for name, value in constants.items()}, output.with_suffix(".safetensors")
            )
    except BaseException as error:  # the parent raises it again, with this graph's name
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def _tokens(spec: GraphSpec) -> int:
    """Tokens of a step."""
    return spec.batch_size * spec.has_decode + spec.ctx_batch_size * spec.chunk_size * spec.has_chunk


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
