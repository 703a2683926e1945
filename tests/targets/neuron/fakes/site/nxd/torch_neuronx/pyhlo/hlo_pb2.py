# SPDX-License-Identifier: Apache-2.0
"""HloModuleProto as an opaque message."""


class HloModuleProto:
    def __init__(self) -> None:
        self._data = b""

    def ParseFromString(self, data: bytes) -> int:  # noqa: N802
        self._data = bytes(data)
        return len(data)

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._data
