"""What clients may send: OpenAI's request bodies with vLLM's sampling parameters.

Nothing is ignored: a parameter is either a field here, or known and accepted only with the value that changes nothing
(`NEUTRAL`), or unknown; the latter two are refused by name. Fields left out or null take their default.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from configs.engine import LimitSettings

MAX_LOGPROBS = 20
"""OpenAI's own bound."""

DEFAULT_LIMITS = LimitSettings()


def _at_most(setting: str, unit: str = "") -> BeforeValidator:
    """Refuses a longer list or string, or a larger number, than `limits.<setting>` says, before looking into it.

    The settings come as pydantic's validation context; without one the defaults hold.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        limit = getattr(info.context or DEFAULT_LIMITS, setting)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        size = value if is_number else len(value) if isinstance(value, list | str) else 0
        if size > limit:
            raise PydanticCustomError("limit", f"at most {limit}{unit} are accepted (limits.{setting})")
        return value

    return BeforeValidator(check)


ANY = object()
"""Marks a parameter that never changes an answer, whatever its value."""

_NEUTRAL_BOTH: dict[str, Any] = {
    "user": ANY,
    "metadata": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
NEUTRAL_CHAT: dict[str, Any] = _NEUTRAL_BOTH | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_special_tokens": (False,),
}
NEUTRAL_COMPLETION: dict[str, Any] = _NEUTRAL_BOTH | {"suffix": ("",), "add_special_tokens": (True,)}
NEUTRAL_MESSAGE: dict[str, Any] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
}


class Body(BaseModel):
    """Base of every body and of what it holds: strict types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)
    neutral: ClassVar[dict[str, Any]] = {}
    """Known fields that are not supported -> the values that change nothing; null always is one."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not cls.neutral.keys() & data.keys():
            return data
        kept = {}
        for name, value in data.items():
            accepted = cls.neutral.get(name, cls)
            if accepted is cls:
                kept[name] = value
            elif not (accepted is ANY or value is None or value in accepted):
                raise PydanticCustomError("unsupported", "", {"name": name, "accepted": accepted, "value": value})
        return kept


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Accepted and without effect: the image processor's settings decide the resolution."""


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"#{kind}" if kind in ("text", "image_url") else None


def _content_kind(content: Any) -> str | None:
    return "#string" if isinstance(content, str) else "#parts" if isinstance(content, list) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("#text")] | Annotated[ImagePart, Tag("#image_url")],
    Discriminator(_part_kind, custom_error_type="unsupported_part", custom_error_message="unsupported part"),
]
Content = Annotated[
    Annotated[str, Tag("#string")] | Annotated[list[ContentPart], Field(fail_fast=True, min_length=1), Tag("#parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="expected a string or a list of parts of type text or image_url",
    ),
]


class Message(Body):
    neutral = NEUTRAL_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1), _at_most("max_messages")]


class StreamOptions(Body):
    neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool | None = None


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


StopString = Annotated[str, Field(min_length=1), _at_most("max_stop_length", " characters")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class SamplingBody(Body):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1 keep the whole vocabulary."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        Annotated[list[StopString], Field(fail_fast=True), _at_most("max_stop_strings")] | None,
        BeforeValidator(_as_list, json_schema_input_type=str | list[StopString] | None),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), _at_most("max_stop_strings")] | None = None
    n: Annotated[int, Field(ge=1), _at_most("max_choices")] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("value", "stream_options is accepted only with stream = true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(SamplingBody):
    neutral = NEUTRAL_CHAT

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _consistent_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("value", "top_logprobs is accepted only with logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("value", "max_tokens and max_completion_tokens differ: set only one of them")
        _check_final_message(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """max_completion_tokens, or its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _check_final_message(messages: list[Message], add_prompt: bool | None, continue_final: bool | None) -> None:
    if continue_final and (add_prompt is not False or messages[-1].role != "assistant"):
        raise PydanticCustomError(
            "value",
            "continue_final_message is accepted only with add_generation_prompt = false, after an assistant message",
        )


def _prompt_kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "#string"
    if not isinstance(prompt, list) or not prompt:
        return None
    first = prompt[0]
    if isinstance(first, int) and not isinstance(first, bool):
        return "#tokens"
    return "#strings" if isinstance(first, str) else "#token_lists" if isinstance(first, list) else None


Prompt = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[TokenIds, Tag("#tokens")]
    | Annotated[list[str], Field(fail_fast=True), _at_most("max_prompts"), Tag("#strings")]
    | Annotated[list[TokenIds], Field(fail_fast=True), _at_most("max_prompts"), Tag("#token_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="expected a string, a list of token ids, or a list of either, not empty",
    ),
]


class CompletionRequest(SamplingBody):
    neutral = NEUTRAL_COMPLETION

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompt or prompts, always as a list of them."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("Sequence[str | list[int]]", [self.prompt] if single else self.prompt)

    @property
    def limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class TokenizeRequest(Body):
    """Either a prompt as /v1/completions takes it or messages as /v1/chat/completions takes them."""

    neutral = {"chat_template": (), "chat_template_kwargs": ({},), "tools": ([],), "mm_processor_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """For a prompt: as the tokenizer's own settings say, unless false. Messages get theirs from the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("value", "expected either prompt or messages")
        if self.messages is not None:
            if self.add_special_tokens:
                raise PydanticCustomError("value", "add_special_tokens is accepted only with prompt")
            _check_final_message(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
