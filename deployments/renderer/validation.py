"""From a request's bytes to a body of `protocol`, and from pydantic's findings to errors a client can act on."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.engine import LimitSettings
from deployments.renderer import protocol
from deployments.renderer.errors import APIError, shorten
from deployments.renderer.protocol import Body

B = TypeVar("B", bound=Body)


def parse_body(model: type[B], content: bytes, limits: LimitSettings | None = None) -> B:
    """Raises APIError (400) that names the first field that is wrong, its value and what is accepted."""
    try:
        return model.model_validate_json(content, context=limits)
    except ValidationError as error:
        raise _to_api_error(error.errors(include_url=False)[0], model) from None
    except RecursionError:
        raise APIError("the body is nested too deeply", code="invalid_json") from None


def _to_api_error(problem: Mapping[str, Any], model: type[Body]) -> APIError:
    path = _path(problem["loc"])
    kind, value, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "json_invalid":
        return APIError(f"the body is not valid JSON: {context.get('error', problem['msg'])}", code="invalid_json")
    if kind == "unsupported":
        path = f"{path}.{context['name']}" if path else context["name"]
        accepted = [shorten(v) if v != {"type": "text"} else '{"type": "text"}' for v in context["accepted"]]
        return APIError(
            f"{path} = {shorten(context['value'])} is not supported by this server: "
            + ("leave it out" + (f", or set it to {' or '.join(accepted)}" if accepted else "")),
            param=path,
            code="unsupported_parameter",
        )
    if kind == "extra_forbidden":
        return APIError(
            f"{path}: no such parameter: accepted are {', '.join(_fields_beside(problem['loc'], model))}",
            param=path,
            code="unknown_parameter",
        )
    if kind == "missing":
        return APIError(f"{path} is missing: it is required", param=path, code="missing_required_parameter")
    if kind == "unsupported_part":
        part = value.get("type") if isinstance(value, dict) else value
        return APIError(
            f"{path}: part of type {shorten(part)} is not supported: expected text or image_url",
            param=path,
            code="unsupported_content",
        )
    if kind == "value" and not path:
        return APIError(problem["msg"], param=problem["msg"].split(" ", 1)[0], code="invalid_value")
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    where = f"{path} = {shorten(value)}" if path else "the body"
    return APIError(f"{where}: {message}", param=path or None, code="invalid_value")


def _path(location: tuple[str | int, ...]) -> str:
    """("messages", 0, "content", "#parts", 1) -> messages[0].content[1]; # marks a branch of a union, not a field."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("#"):
            path += f".{part}" if path else part
    return path[:200]


def _fields_beside(location: tuple[str | int, ...], model: type[BaseModel]) -> list[str]:
    """The names that are accepted where an unknown one was found."""
    fields: Any = model
    for part in location[:-1]:
        if isinstance(part, str):
            fields = _NESTED.get(part, fields)
    return list(fields.model_fields)


_NESTED: dict[str, type[BaseModel]] = {
    "messages": protocol.Message,
    "#text": protocol.TextPart,
    "#image_url": protocol.ImagePart,
    "image_url": protocol.ImageUrl,
    "stream_options": protocol.StreamOptions,
}
