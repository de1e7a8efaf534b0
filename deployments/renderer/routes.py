"""The HTTP routes: bodies in, answers or OpenAI-shaped errors out. No logic of a request lives here."""

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.engine import EngineConfig, ServerSettings
from deployments.renderer import protocol, responses
from deployments.renderer.api_keys import ApiKeys, KeyMiddleware
from deployments.renderer.disconnect import EventStream, ReceiveMiddleware, while_connected
from deployments.renderer.engine_client import EngineUnavailableError
from deployments.renderer.errors import APIError
from deployments.renderer.serving import Renderer
from deployments.renderer.validation import parse_body
from telemetry.logs import LOGGER_NAME

logger = logging.getLogger(LOGGER_NAME)

B = TypeVar("B", bound=protocol.Body)

PARSE_INLINE_BYTES = 1024**2
"""A larger body is parsed in a worker thread."""


def build_api(renderer: Renderer, config: EngineConfig, render_metrics: Callable[[], tuple[bytes, str]]) -> FastAPI:
    """The application. `render_metrics` gives the body of /metrics and its content type; it runs in a worker thread."""
    api = FastAPI(
        title="trn-vision-serve",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    api.add_middleware(FailureMiddleware)
    api.add_middleware(ReceiveMiddleware)
    keys = ApiKeys.load(config.server, os.environ)
    if keys is not None:
        api.add_middleware(KeyMiddleware, keys=keys, open_paths=_open_paths(config.server))
    _add_error_handlers(api)

    async def parsed(request: Request, model: type[B]) -> B:
        content = await _read_body(request, config.server.max_body_bytes)
        if len(content) < PARSE_INLINE_BYTES:
            return parse_body(model, content, config.limits)
        return await asyncio.to_thread(parse_body, model, content, config.limits)

    @api.post("/v1/chat/completions", openapi_extra=_takes(protocol.ChatCompletionRequest), responses=_STREAMS)
    async def chat_completions(request: Request) -> Response:
        body = await parsed(request, protocol.ChatCompletionRequest)
        return await while_connected(request, _respond(renderer.chat(body, _trace_context(request))))

    @api.post("/v1/completions", openapi_extra=_takes(protocol.CompletionRequest), responses=_STREAMS)
    async def completions(request: Request) -> Response:
        body = await parsed(request, protocol.CompletionRequest)
        return await while_connected(request, _respond(renderer.complete(body, _trace_context(request))))

    @api.post("/tokenize", openapi_extra=_takes(protocol.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return _json(await renderer.tokenize(await parsed(request, protocol.TokenizeRequest)))

    @api.post("/detokenize", openapi_extra=_takes(protocol.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return _json(await renderer.detokenize(await parsed(request, protocol.DetokenizeRequest)))

    @api.get("/v1/models")
    async def models() -> Response:
        return _json(renderer.models())

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        renderer.check_model(name)
        return _json(renderer.models().data[0])

    @api.get("/health", response_class=Response)
    async def health() -> Response:
        if not await renderer.engine.health():
            raise APIError("the engine is not ready", status=503, code="engine_unavailable")
        return Response()

    @api.get("/version")
    async def version() -> dict[str, str]:
        return {"version": _version()}

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        if config.server.metrics == "off":
            raise APIError("metrics are off: set server.metrics to key or open", status=403, code="metrics_off")
        content, content_type = await asyncio.to_thread(render_metrics)
        return Response(content, headers={"Content-Type": content_type})

    _add_reset_routes(api, renderer, config.server.development_mode)
    api.openapi = lambda: _openapi(api, with_keys=keys is not None)  # type: ignore[method-assign]  # as FastAPI says
    return api


def _open_paths(settings: ServerSettings) -> frozenset[str]:
    """What needs no API key. Load balancers ask for health, and know none."""
    return frozenset({"/health"} | ({"/metrics"} if settings.metrics == "open" else set()))


def _add_reset_routes(api: FastAPI, renderer: Renderer, development_mode: bool) -> None:
    def check() -> None:
        if not development_mode:
            raise APIError(
                "caches are reset only in development mode: set server.development_mode to true",
                status=403,
                code="development_mode_off",
            )

    @api.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        check()
        await renderer.engine.reset_prefix_cache()
        return Response()

    @api.post("/reset_mm_cache", response_class=Response)
    async def reset_mm_cache() -> Response:
        check()
        renderer.processor_cache.reset()
        return Response()

    @api.post("/reset_encoder_cache", response_class=Response)
    async def reset_encoder_cache() -> Response:
        check()
        await renderer.engine.reset_encoder_cache()
        return Response()


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(APIError)
    async def on_api_error(_: Request, error: APIError) -> Response:
        return _error(error)

    @api.exception_handler(EngineUnavailableError)
    async def on_unavailable(_: Request, error: EngineUnavailableError) -> Response:
        return _error(APIError(str(error), status=503, code="engine_unavailable", retry_after=error.retry_after))

    @api.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message, code = f"{request.url.path}: no such route", "unknown_url"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message, code = f"{request.method} {request.url.path}: expected {allowed}", "method_not_allowed"
        else:
            message, code = str(error.detail), "bad_request"
        response = _error(APIError(message[:500], status=error.status_code, code=code))
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it


class FailureMiddleware:
    """What nothing else has handled is logged, and becomes a 500. Starlette's own handling raises it once more behind
    the response, and the server then closes the connection under the client's next request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            logger.exception("%s failed", scope["method"])
            error = APIError("the server failed; the request may be sent again", status=500, code="internal_error")
            await _error(error)(scope, receive, send)


async def _respond(answer: Coroutine[Any, Any, responses.Response | AsyncGenerator[bytes, None]]) -> Response:
    """The answer as a response. A stream's first event is awaited here, so that an early error gets its HTTP status."""
    result = await answer
    if isinstance(result, responses.Response):
        return _json(result)
    return EventStream(await anext(result), result)


async def _read_body(request: Request, limit: int) -> bytes:
    """The body. Raises APIError (413) beyond `limit` bytes, at once where the client announces them."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise _body_too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _body_too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _body_too_large(limit: int) -> APIError:
    return APIError(
        f"the body is too large: at most {limit:,} bytes are accepted (server.max_body_bytes)",
        status=413,
        code="body_too_large",
    )


def _trace_context(request: Request) -> dict[str, str]:
    """The W3C headers that the client sent; of a long `tracestate`, as many whole members as 512 characters hold."""
    found = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    return {name: v if len(v) <= 512 else v[:513].rpartition(",")[0] for name, v in found.items()}


def _json(body: responses.Response) -> Response:
    return Response(body.to_json(), media_type="application/json")


def _error(error: APIError) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def _version() -> str:
    try:
        return importlib.metadata.version("trn-vision-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, description in (("4XX", "The request has to change."), ("503", "The engine is not ready; try again."))
}
_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's description of a body that the route parses itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(api: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (
            protocol.ChatCompletionRequest,
            protocol.CompletionRequest,
            protocol.TokenizeRequest,
            protocol.DetokenizeRequest,
        ):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        schemas["Error"] = _ERROR_SCHEMA
        if with_keys:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        api.openapi_schema = document
    return api.openapi_schema
