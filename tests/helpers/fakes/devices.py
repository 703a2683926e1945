# SPDX-License-Identifier: Apache-2.0
"""Plays the devices of all ranks: `python devices.py SOCKET`, with CPU_NUM_DEVICES of XLA's CPU devices, a thread for each."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
import threading
from typing import Any

import torch
import torch_xla
from fake_neuron import remote, wire
from torch_xla.core import xla_builder

from optimum_neuron.tools.certify.host_ranks import number_channels


_programs: dict[str, tuple[wire.Module, Any]] = {}
_lock = threading.Lock()


def main(path: str) -> None:
    """Serves until its process is ended."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            threading.Thread(target=_serve, args=(server.accept()[0],), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    while True:
        try:
            rank, hlo, *arguments = remote.receive(connection)
        except EOFError:
            return
        remote.send(connection, _run(struct.unpack("<I", rank)[0], bytes(hlo), arguments))


def _run(rank: int, data: bytes, arguments: list[bytearray]) -> list[bytes]:
    digest = hashlib.sha256(data).hexdigest()
    with _lock:
        if digest not in _programs:
            program = xla_builder.computation_from_module_proto(digest, number_channels(data))
            _programs[digest] = wire.read_module(data), program
    module, program = _programs[digest]
    device = f"xla:{rank}"
    tensors = [
        torch.frombuffer(each, dtype=getattr(torch, tensor.dtype)).view(tensor.shape).to(device)
        for each, tensor in zip(arguments, module.inputs, strict=True)
    ]
    with _lock:  # one compiles for all: ranks that wait for each other for long are ended
        results = torch_xla._XLAC._xla_user_computation(f"xla::{digest}", tensors, program)
        torch_xla._XLAC._xla_sync_multi(results, [device], False, True)
    return [each.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in results]


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    main(sys.argv[1])
