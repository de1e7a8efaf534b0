"""What a client is told when a request cannot be served: OpenAI's error shape and status codes."""

import math
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

RETRY_AFTER_S = 1
"""Seconds that a client is asked to wait when nobody knows better."""


class APIError(Exception):
    """An error for the client: it becomes an HTTP response, or the last event of a stream that has begun.

    `param` is the path of the field to change ("messages[0].content[1]"), `code` a machine-readable reason.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = RETRY_AFTER_S if retry_after is None and status in (429, 503) else retry_after

    def at(self, param: str) -> "APIError":
        """The same error, naming the field that it is about."""
        return APIError(
            f"{param}: {self.message}",
            status=self.status,
            param=param,
            code=self.code,
            retry_after=self.retry_after,
        )

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body: {"error": {"message", "type", "param", "code"}}."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def shorten(value: Any, limit: int = 80) -> str:
    """A client's value as it may appear in a message: never longer than `limit` characters."""
    if isinstance(value, str):
        text = repr(value if len(value) <= limit else value[:limit])
        return text if len(value) <= limit else f"{text[:-1]}...{text[-1]} ({len(value)} characters)"
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"an empty {kind}" if not value else "a list" if kind == "list" else "an object"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "an enormous integer"
    return text if len(text) <= limit else text[:limit] + "..."
