"""API keys: who may ask at all. They come from a file or the environment, and are kept as digests only."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.engine import ConfigError, ServerSettings
from deployments.renderer.errors import APIError

_KEY = re.compile(r"[!-~]+")  # printable ASCII without spaces, as an HTTP header may carry it


class ApiKeys:
    """The keys that are accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, settings: ServerSettings, environment: Mapping[str, str]) -> "ApiKeys | None":
        """The keys of both places; None where neither is set. Raises ConfigError for a place that holds no key."""
        keys: list[str] = []
        if settings.api_keys_file is not None:
            where = f"server.api_keys_file = {settings.api_keys_file!r}"
            try:
                lines = Path(settings.api_keys_file).read_text().splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"{where}: {type(error).__name__}: expected a readable text file of keys") from None
            keys += _valid([key for line in lines if (key := line.strip()) and key[0] != "#"], where)
        if settings.api_keys_variable is not None:
            where = f"server.api_keys_variable = {settings.api_keys_variable!r}"
            keys += _valid(environment.get(settings.api_keys_variable, "").replace(",", " ").split(), where)
        return cls(keys) if keys else None

    def accepts(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header holds one of the keys. Takes as long for every wrong one."""
        scheme, _, key = authorization.strip().partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _valid(keys: list[str], where: str) -> list[str]:
    """The same keys. The error says where, never what."""
    if not keys:
        raise ConfigError(f"{where}: it holds no key: expected one at least")
    for index, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{where}: key {index}: expected printable ASCII characters without spaces")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyMiddleware:
    """Answers 401 before anything of a request without a key is read; `open_paths` need none."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) not in self._open_paths:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            if given is None or not self._keys.accepts(given):
                error = APIError(
                    "no API key was given: expected the header Authorization: Bearer <key>"
                    if given is None
                    else "the API key is not one of this server's: expected Authorization: Bearer <key>",
                    status=401,
                    code="invalid_api_key",
                )
                response = JSONResponse(error.body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
