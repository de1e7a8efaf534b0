"""What the Renderer needs of an engine."""

from collections.abc import AsyncIterator
from typing import Protocol

from actors.messages import EngineOutput, EngineRequest


class EngineUnavailableError(Exception):
    """No engine can take or go on with the request now; clients get 503 with Retry-After (seconds)."""

    def __init__(self, message: str, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineLostError(EngineUnavailableError):
    """The engine that had the request cannot go on with it; another one, or the same one later, can."""


class EngineClient(Protocol):
    """One engine, or the fleet of them, as seen by a Renderer. Every method may raise EngineUnavailableError."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """The request's outputs in order, the last with a finish_reason. Closing the iterator aborts the request."""
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def health(self) -> bool: ...
