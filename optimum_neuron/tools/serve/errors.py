# SPDX-License-Identifier: Apache-2.0
"""What a client is told where its request is refused or fails, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


# Characters of a member's name that an answer repeats.
_LONGEST = 100


class ApiError(Exception):
    """Why a request gets no answer.

    Args:
        message: one sentence for the client.
        status: of the HTTP response.
        param: the member of the body that is at fault, where one is.
        code: a name of the fault, for programs.
        kind: OpenAI's `type`.
        headers: further ones of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.kind = message, status, code, kind
        self.param = param and param[:_LONGEST]
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def failed(
    message: str, *, status: int = 500, code: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """A fault of the server's."""
    return ApiError(message, status=status, code=code, kind="server_error", headers=headers)


class ClientGoneError(Exception):
    """The client closed its connection: nobody reads an answer."""
