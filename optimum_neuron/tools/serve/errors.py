# SPDX-License-Identifier: Apache-2.0
"""Errors for clients, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


# Characters of a member's name that an answer repeats.
_LONGEST = 100


class ApiError(Exception):
    """The reason why a request gets no answer.

    Args:
        message: one sentence for the client.
        status: status of the HTTP response.
        param: wrong member of the body, where one is.
        code: name of the fault, for programs.
        kind: OpenAI's `type`.
        headers: further headers of the response.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def server_error(
    message: str, *, status: int = 500, code: str | None = None, headers: Mapping[str, str] | None = None
) -> ApiError:
    """Return an error that is the server's fault."""
    return ApiError(message, status=status, code=code, kind="server_error", headers=headers)


class ClientGoneError(Exception):
    """The client closed its connection: no answer is read."""
