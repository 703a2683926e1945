# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch_neuronx.spmd import DeviceTensor


class StateInitializer(torch.nn.Module):
    def __init__(self, shapes, dtypes, local_ranks_size) -> None:
        super().__init__()
        self.shapes, self.dtypes, self.local_ranks_size = shapes, dtypes, local_ranks_size

    def forward(self):
        return [
            {
                name: DeviceTensor(shape, self.dtypes[name], rank).copy_(torch.zeros(shape, dtype=self.dtypes[name]))
                for name, shape in self.shapes.items()
            }
            for rank in range(self.local_ranks_size)
        ]
