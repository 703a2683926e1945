# SPDX-License-Identifier: Apache-2.0
"""Compiles one graph with neuronx-distributed: `python -m optimum_neuron.targets.neuron.compile.nxd_compile GRAPH [FLAG ...]`.

Reads GRAPH.hlo and GRAPH.json in the working directory and leaves GRAPH.neff and GRAPH.metaneff there.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from ..graph_files import HLO_SUFFIX, read_graph_io
from .metaneff import build_metaneff
from .neuron_cc import COMPILER_LOG, NEFF_SUFFIX
from .nxd import METANEFF_SUFFIX


def main(graph: str, *flags: str) -> None:
    """Compiles GRAPH with these compiler flags."""
    from neuronx_distributed.trace.functions import compile as compile_hlo
    from torch_neuronx.proto import metaneff_pb2
    from torch_neuronx.pyhlo import hlo_pb2

    path = Path(graph + HLO_SUFFIX)
    data, io = path.read_bytes(), read_graph_io(path)
    module = hlo_pb2.HloModuleProto()
    module.ParseFromString(data)
    metaneff = build_metaneff(io, data, metaneff_pb2)
    log = Path(COMPILER_LOG).absolute()  # the compiler runs in another folder
    artifacts = compile_hlo(
        hlo_module=module,
        metaneff=metaneff,
        compiler_workdir="work",
        compiler_args=shlex.join([*flags, f"--logfile={log}"]),
        key=graph,
    )
    os.replace(artifacts.neff_filepath, graph + NEFF_SUFFIX)
    Path(graph + METANEFF_SUFFIX).write_bytes(metaneff.SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
