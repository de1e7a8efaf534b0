"""A request's root span says how the request ended, and always ends."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.renderer.errors import APIError
from deployments.renderer.generation import Delta
from deployments.renderer.protocol import CompletionRequest
from deployments.renderer.request_scope import RequestScope
from telemetry import spans

Record = Callable[[], list[dict[str, Any]]]
REASONS = "gen_ai.response.finish_reasons"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Spans are on, for every sampler; gives those that were recorded."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    file = tmp_path / "spans.jsonl"
    spans.configure("renderer", str(file))

    def recorded() -> list[dict[str, Any]]:
        spans.shutdown()
        return [json.loads(line) for line in file.read_text().splitlines()]

    yield recorded
    spans.shutdown()


def begin(**fields: Any) -> RequestScope:
    return RequestScope.begin("cmpl-1", {}, CompletionRequest(prompt="x", **fields))


def test_a_client_that_leaves_before_there_is_an_answer_is_no_error(record: Record) -> None:
    begin().fail(asyncio.CancelledError())
    (span,) = record()
    assert (span["status"], span["attributes"][REASONS]) == ("UNSET", ["abort"])


@pytest.mark.parametrize("error", [APIError("the image is empty"), KeyError()])
def test_what_is_refused_or_fails_is_an_error(record: Record, error: Exception) -> None:
    begin().fail(error)
    (span,) = record()
    assert span["status"] == "ERROR"


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (None, ("UNSET", ["stop", "abort", "abort"])),
        (APIError("the engine was lost", status=503), ("ERROR", ["stop", "error", "error"])),
    ],
)
def test_choices_that_never_spoke_have_a_reason_too(record: Record, then: Exception | None, expected: tuple) -> None:
    async def deltas() -> AsyncGenerator[Delta, None]:
        yield Delta(1, text="a", completion_tokens=1)
        yield Delta(0, finish_reason="stop", completion_tokens=1)
        if then is not None:
            raise then
        await asyncio.sleep(60)

    async def read() -> None:
        followed = begin(n=3).follow(deltas(), 5, 3)
        assert [(await anext(followed)).index, (await anext(followed)).index] == [1, 0]
        if then is None:
            await followed.aclose()
        else:
            with pytest.raises(APIError):
                await anext(followed)

    asyncio.run(read())
    (span,) = record()
    assert (span["status"], span["attributes"][REASONS]) == expected
    assert span["attributes"]["gen_ai.usage.output_tokens"] == 2


def test_attributes_are_short_whatever_a_client_writes(record: Record) -> None:
    begin(model="m" * 1_000_000).fail(APIError("no such model"))
    (span,) = record()
    assert len(json.dumps(span)) < 2000


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (APIError("prompt = 'hush'", param="prompt", code="invalid_value"), "invalid_value: prompt"),
        (APIError("the engine was lost", status=503), "the engine was lost"),
        (RuntimeError("a bug"), "a bug"),
    ],
)
def test_what_a_client_wrote_is_not_in_a_span(record: Record, error: Exception, why: str) -> None:
    begin().fail(error)
    (span,) = record()
    assert "hush" not in json.dumps(span)
    assert span["description"] == why


def test_what_must_not_be_recorded_is_not_for_any_sampler(record: Record) -> None:
    with spans.span("render: tokenize", spans.UNRECORDED):
        spans.mark("mm: cache_lookup", spans.UNRECORDED, {})
    with spans.span("seen", None):
        pass
    assert [span["name"] for span in record()] == ["seen"]
