"""From deltas to the two APIs' answers: whole, or as server-sent events."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from deployments.renderer import logprobs
from deployments.renderer.errors import APIError
from deployments.renderer.generation import Delta, close
from deployments.renderer.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    Response,
    Usage,
)
from deployments.renderer.responses import Delta as ChatDelta
from deployments.renderer.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(body: Response) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: APIError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"


@dataclass(frozen=True)
class Answer:
    """What every part of one answer carries."""

    id: str
    model: str
    tokenizer: PromptTokenizer
    num_choices: int
    prompt_tokens: Sequence[int]
    """Of each prompt; `num_choices / len(prompt_tokens)` choices belong to each."""
    num_logprobs: int | None
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, completion_tokens: dict[int, int], cached_tokens: dict[int, int]) -> Usage:
        """Prompts count once, however many choices were drawn from them; so do their cached tokens (first choice's)."""
        prompt, completion = sum(self.prompt_tokens), sum(completion_tokens.values())
        choices_per_prompt = self.num_choices // len(self.prompt_tokens)
        cached = sum(count for index, count in cached_tokens.items() if index % choices_per_prompt == 0)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class Format(Protocol):
    """One API's shapes."""

    def opening(self, answer: Answer) -> list[Response]: ...

    def chunk(self, answer: Answer, delta: Delta) -> Response: ...

    def last(self, answer: Answer, usage: Usage) -> Response: ...

    def whole(self, answer: Answer, choices: list[Delta], usage: Usage) -> Response: ...


class ChatFormat:
    """/v1/chat/completions."""

    def opening(self, answer: Answer) -> list[Response]:
        delta = ChatDelta(role="assistant", content="")
        return [self._chunk(answer, [ChatChunkChoice(index=i, delta=delta)]) for i in range(answer.num_choices)]

    def chunk(self, answer: Answer, delta: Delta) -> Response:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text or None) if delta.finish_reason else ChatDelta(content=delta.text),
            logprobs=self._logprobs(answer, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._chunk(answer, [choice])

    def last(self, answer: Answer, usage: Usage) -> Response:
        return self._chunk(answer, [], usage)

    def whole(self, answer: Answer, choices: list[Delta], usage: Usage) -> Response:
        return ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=choice.text),
                    logprobs=self._logprobs(answer, choice, whole=True),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _chunk(self, answer: Answer, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=answer.id,
            object="chat.completion.chunk",
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, answer: Answer, delta: Delta, *, whole: bool = False) -> ChatLogprobs | None:
        if answer.num_logprobs is None or not (delta.logprobs or whole):
            return None
        return ChatLogprobs(content=logprobs.for_chat(delta.logprobs, answer.tokenizer))


class CompletionFormat:
    """/v1/completions."""

    def opening(self, answer: Answer) -> list[Response]:
        return []

    def chunk(self, answer: Answer, delta: Delta) -> Response:
        return self._completion(answer, [delta])

    def last(self, answer: Answer, usage: Usage) -> Response:
        return self._completion(answer, [], usage)

    def whole(self, answer: Answer, choices: list[Delta], usage: Usage) -> Response:
        return self._completion(answer, choices, usage)

    def _completion(self, answer: Answer, choices: list[Delta], usage: Usage | None = None) -> Completion:
        return Completion(
            id=answer.id,
            object="text_completion",
            created=answer.created,
            model=answer.model,
            choices=[
                CompletionChoice(
                    index=choice.index,
                    text=choice.text,
                    logprobs=self._logprobs(answer, choice),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _logprobs(self, answer: Answer, delta: Delta) -> CompletionLogprobs | None:
        if answer.num_logprobs is None:
            return None
        with_top = answer.num_logprobs > 0
        return logprobs.for_completion(delta.logprobs, delta.offsets, answer.tokenizer, with_top=with_top)


async def collect(answer: Answer, style: Format, deltas: AsyncGenerator[Delta, None]) -> Response:
    """The whole answer."""
    choices = [Delta(index) for index in range(answer.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    try:
        async for delta in deltas:
            choice = choices[delta.index]
            texts[delta.index].append(delta.text)
            choice.logprobs += delta.logprobs
            choice.offsets += delta.offsets
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            choice.completion_tokens = delta.completion_tokens
            choice.cached_tokens = max(choice.cached_tokens, delta.cached_tokens)
    finally:
        await close(deltas)
    for choice, text in zip(choices, texts, strict=True):
        choice.text = "".join(text)
    usage = answer.usage(
        {choice.index: choice.completion_tokens for choice in choices},
        {choice.index: choice.cached_tokens for choice in choices},
    )
    return style.whole(answer, choices, usage)


async def stream(
    answer: Answer, style: Format, deltas: AsyncGenerator[Delta, None], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as events, the first of them once the engine has taken a choice: until then APIError is raised,
    behind it an error becomes the last event."""
    completion_tokens: dict[int, int] = {}
    cached_tokens: dict[int, int] = {}
    begun = False
    try:
        async for delta in deltas:
            if not begun:
                begun = True
                if opening := style.opening(answer):
                    yield b"".join(map(event, opening))
            completion_tokens[delta.index] = delta.completion_tokens
            cached_tokens[delta.index] = max(cached_tokens.get(delta.index, 0), delta.cached_tokens)
            if delta.text or delta.logprobs or delta.finish_reason:
                yield event(style.chunk(answer, delta))
        if include_usage:
            yield event(style.last(answer, answer.usage(completion_tokens, cached_tokens)))
        yield DONE
    except APIError as error:
        if not begun:
            raise
        yield error_event(error)
    except Exception:
        if not begun:
            raise
        logger.exception("request %s failed", answer.id)
        yield error_event(APIError("the server failed; the request may be sent again", status=500))
    finally:
        await close(deltas)
