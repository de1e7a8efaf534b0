"""What clients receive: OpenAI's response bodies with vLLM's additions (stop_reason, max_model_len)."""

from typing import Literal

import msgspec


class Response(msgspec.Struct):
    """Base of every response body; encoded by msgspec."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


class PromptTokensDetails(Response, kw_only=True):
    cached_tokens: int


class Usage(Response, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Response, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response, kw_only=True):
    content: list[TokenLogprob]


class CompletionLogprobs(Response, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatMessage(Response, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Response, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(Response, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Response, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Response, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatChunk(Response, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(Response, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(Response, kw_only=True, omit_defaults=True):
    """Of a whole completion and of one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(Response, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trn-vision-serve"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Response, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Response, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Response, kw_only=True):
    prompt: str
