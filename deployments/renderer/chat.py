"""From messages to a prompt: token ids in which each image has as many placeholder tokens as embeddings."""

from dataclasses import dataclass, field
from typing import Any

from actors.messages import MMItem
from deployments.renderer.checkpoint import Checkpoint
from deployments.renderer.errors import APIError
from deployments.renderer.processor_cache import CachedImage
from deployments.renderer.protocol import ImagePart, Message
from deployments.renderer.tokenizer import PromptTokenizer, Quotes
from telemetry import spans


@dataclass(frozen=True)
class Prompt:
    """What an EngineRequest needs of a prompt."""

    token_ids: tuple[int, ...]
    mm_items: tuple[MMItem, ...] = ()
    """Sorted by offset."""
    pixels: dict[str, Any] = field(default_factory=dict)
    """mm_hash -> reference."""


@dataclass(frozen=True)
class ImageSource:
    """An image in a request, not yet loaded."""

    url: str
    param: str
    """Where it stands: "messages[0].content[1].image_url.url"."""


def find_images(messages: list[Message]) -> list[ImageSource]:
    """The images of a conversation, in the order in which the chat template will place them."""
    images = []
    for m, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for p, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                where = f"messages[{m}].content[{p}]"
                if message.role != "user":
                    raise APIError(
                        f"{where}: an image in a message of role {message.role}: expected images in user messages only",
                        param=where,
                        code="unsupported_content",
                    )
                images.append(ImageSource(part.image_url.url, f"{where}.image_url.url"))
    return images


class PromptBuilder:
    """Renders the checkpoint's chat template and encodes the result."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: PromptTokenizer, max_model_len: int) -> None:
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._media_tokens = [tokenizer.token_str(token_id) for token_id in sorted(checkpoint.media_token_ids)]
        self._template_globals = dict(checkpoint.tokenizer.special_tokens_map)

    def encode_messages(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        trace: spans.Context = None,
    ) -> list[int]:
        """Token ids, with one placeholder token per image. Slow for long conversations."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        self._check_characters(sum(map(num_characters, messages)), "messages")
        if len(messages) > self._max_model_len:  # each takes a token at least
            raise self._too_long(f"at least {len(messages)}", "messages")
        quotes = Quotes(self._tokenizer.special_ids)
        conversation = [_for_template(message, quotes) for message in messages]
        try:
            with spans.span("render: chat_template", trace):
                rendered: Any = render_jinja_template(
                    [conversation],
                    chat_template=self._checkpoint.chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **self._template_globals,
                )
        except (TemplateError, ValueError, TypeError) as error:
            raise APIError(
                f"messages: the model's chat template cannot render them: {str(error)[:300]}",
                param="messages",
                code="invalid_value",
            ) from None
        with spans.span("render: tokenize", trace):
            return self._tokenizer.encode_quoted(rendered[0][0], quotes)

    def encode_text(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt: special tokens in it count, but those that stand for media are text."""
        self._check_characters(len(text), param)
        quotes = Quotes(self._media_tokens)
        return self._tokenizer.encode_quoted(quotes.quote([text])[0], quotes, add_special_tokens=add_special_tokens)

    def check_token_ids(self, token_ids: list[int], param: str) -> list[int]:
        """The same token ids of a raw prompt, if the model knows them and none stands for media."""
        self.check_length(len(token_ids), param)
        vocab_size = self._checkpoint.vocab_size
        for index, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                raise APIError(
                    f"{param}[{index}] = {token_id}: expected token ids below {vocab_size}",
                    param=param,
                    code="invalid_value",
                )
            if token_id in self._checkpoint.media_token_ids:
                raise APIError(
                    f"{param}[{index}] = {token_id}: {self._tokenizer.token_str(token_id)} stands for media, which are "
                    "sent as image_url parts to /v1/chat/completions",
                    param=param,
                    code="invalid_value",
                )
        return token_ids

    def build(self, token_ids: list[int], images: list[CachedImage], param: str) -> Prompt:
        """Expand each placeholder token to its image's embeddings. Raises APIError for a prompt that is too long."""
        placeholder = self._checkpoint.image_token_id
        if token_ids.count(placeholder) != len(images):
            raise APIError(
                f"messages: the model's chat template placed {token_ids.count(placeholder)} of {len(images)} images",
                param="messages",
                code="invalid_value",
            )
        expanded: list[int] = []
        items: list[MMItem] = []
        remaining = iter(images)
        for token_id in token_ids:
            if token_id != placeholder:
                expanded.append(token_id)
                continue
            image = next(remaining)
            length = image.num_embeddings
            items.append(
                MMItem(
                    mm_hash=image.mm_hash,
                    offset=len(expanded),
                    length=length,
                    num_embeddings=length,
                    grid=image.grid,
                )
            )
            expanded += [placeholder] * length
        if not expanded:
            raise APIError(
                f"{param}: the prompt is empty: expected at least one token", param=param, code="invalid_value"
            )
        self.check_length(len(expanded), param)
        return Prompt(tuple(expanded), tuple(items), {image.mm_hash: image.pixels for image in images})

    def describe(self, prompt: Prompt) -> str:
        """The prompt as text, each image as its mm_hash: for a log that was asked for."""
        text, end = "", 0
        for item in prompt.mm_items:
            before = list(prompt.token_ids[end : item.offset])
            text += self._tokenizer.decode(before, skip_special_tokens=False) + f"<image {item.mm_hash}>"
            end = item.offset + item.length
        return text + self._tokenizer.decode(list(prompt.token_ids[end:]), skip_special_tokens=False)

    def check_length(self, num_tokens: int, param: str) -> None:
        """A prompt must leave room for one token at least."""
        if num_tokens >= self._max_model_len:
            raise self._too_long(str(num_tokens), param)

    def max_tokens(self, prompt: Prompt, asked: int | None, param: str) -> int:
        """How many tokens may be generated: what was asked for, or what the model's length leaves."""
        rest = self._max_model_len - len(prompt.token_ids)
        if asked is None:
            return rest
        if asked > rest:
            raise APIError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{len(prompt.token_ids) + asked} tokens ({len(prompt.token_ids)} in the {param}, {asked} in the "
                f"completion). Please set max_tokens to at most {rest}, or shorten the {param}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return asked

    def _check_characters(self, count: int, param: str) -> None:
        """Refuse what cannot fit before encoding it. Four times the longest token allows for Unicode normalization."""
        if count > 4 * self._tokenizer.max_token_length * self._max_model_len:
            raise self._too_long(f"far too many ({count:,} characters)", param)

    def _too_long(self, num_tokens: str, param: str) -> APIError:
        return APIError(
            f"This model's maximum context length is {self._max_model_len} tokens. However, your {param} resulted in "
            f"{num_tokens} tokens, and at least one must be left for the answer. Please shorten the {param}.",
            param=param,
            code="context_length_exceeded",
        )


def num_characters(message: Message) -> int:
    """Of the message's text."""
    if isinstance(message.content, str):
        return len(message.content)
    return sum(0 if isinstance(part, ImagePart) else len(part.text) for part in message.content)


def _for_template(message: Message, quotes: Quotes) -> dict[str, Any]:
    """The message as chat templates take it; `developer` is OpenAI's newer name for `system`."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": quotes.quote([message.content])[0]}
    texts = [part.text for part in message.content if not isinstance(part, ImagePart)]
    quoted = iter(quotes.quote(texts))
    return {
        "role": role,
        "content": [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": next(quoted)}
            for part in message.content
        ],
    }
