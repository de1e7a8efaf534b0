"""Renderer: what the HTTP routes call. From a parsed body to engine requests, and back to an answer."""

import asyncio
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from actors.messages import EngineRequest, SamplingParams
from configs.engine import EngineConfig
from deployments.block_hash import prompt_hashes
from deployments.renderer import answers, generation
from deployments.renderer.answers import Answer, ChatFormat, CompletionFormat, Format
from deployments.renderer.chat import Prompt, PromptBuilder, find_images, num_characters
from deployments.renderer.checkpoint import Checkpoint
from deployments.renderer.detokenizer import Detokenizer
from deployments.renderer.engine_client import EngineClient
from deployments.renderer.errors import APIError, shorten
from deployments.renderer.image_loader import ImageLoader
from deployments.renderer.network import Network
from deployments.renderer.processor import ImageProcessor
from deployments.renderer.processor_cache import ProcessorCache
from deployments.renderer.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    SamplingBody,
    TokenizeRequest,
)
from deployments.renderer.request_metrics import RequestMetrics, Siblings, show_counters
from deployments.renderer.request_scope import RequestScope
from deployments.renderer.responses import Detokenized, Model, ModelList, Response, Tokenized
from deployments.renderer.tokenizer import PromptTokenizer
from telemetry import spans
from telemetry.logs import LOGGER_NAME
from telemetry.recorder import Recorder

logger = logging.getLogger(LOGGER_NAME)

INLINE_CHARACTERS = 16_384
"""Shorter work is done on the event loop: a worker thread costs more than the milliseconds that it would save."""


class Renderer:
    """One replica's work, without HTTP. Everything runs on one event loop; what is slow, in a few worker threads."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        engine: EngineClient,
        recorder: Recorder,
        store: Callable[[np.ndarray], Any] = lambda pixels: pixels,
        network: Network | None = None,
    ) -> None:
        """`network`: where remote images come from; None: the internet."""
        self._config = config
        self._checkpoint = checkpoint
        self.engine = engine
        self._executor = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="renderer")
        self._tokenizer = PromptTokenizer(checkpoint.tokenizer)
        self._prompts = PromptBuilder(checkpoint, self._tokenizer, config.model.max_model_len)
        self.processor_cache = ProcessorCache(config.processor_cache.max_bytes, recorder, self._executor, store)
        processor = ImageProcessor(checkpoint.image_processor, config.model.name)
        self._images = ImageLoader(config.multimodal, processor, self.processor_cache, self._executor, network)
        self._recorder = recorder
        show_counters(recorder)
        self._created = int(time.time())

    def close(self) -> None:
        """Stop the worker threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def models(self) -> ModelList:
        model = self._config.model
        return ModelList(
            data=[Model(id=model.name, created=self._created, root=model.path, max_model_len=model.max_model_len)]
        )

    def check_model(self, name: str | None) -> None:
        served = self._config.model.name
        if name is not None and name != served:
            raise APIError(
                f"The model {shorten(name)} does not exist: this server serves {served!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def chat(
        self, body: ChatCompletionRequest, trace_context: Mapping[str, str]
    ) -> Response | AsyncGenerator[bytes, None]:
        """The whole answer, or its events when the body asks for a stream. Raises APIError."""
        scope = RequestScope.begin(f"chatcmpl-{uuid.uuid4().hex}", trace_context, body)
        try:
            self.check_model(body.model)
            self._check_choices(body, 1)
            prompt = await self._chat_prompt(
                body.messages, body.add_generation_prompt, body.continue_final_message, scope, body.cache_salt
            )
            max_tokens = self._prompts.max_tokens(prompt, body.limit, "messages")
            return await self._answer(body, ChatFormat(), [prompt], [max_tokens], body.num_logprobs, scope)
        except BaseException as error:
            scope.fail(error)
            raise

    async def complete(
        self, body: CompletionRequest, trace_context: Mapping[str, str]
    ) -> Response | AsyncGenerator[bytes, None]:
        """As `chat`, for each of one or more raw prompts."""
        scope = RequestScope.begin(f"cmpl-{uuid.uuid4().hex}", trace_context, body)
        try:
            self.check_model(body.model)
            prompts = await self._raw_prompts(body)
            max_tokens = [self._prompts.max_tokens(prompt, body.limit, "prompt") for prompt in prompts]
            return await self._answer(body, CompletionFormat(), prompts, max_tokens, body.logprobs, scope)
        except BaseException as error:
            scope.fail(error)
            raise

    def _check_choices(self, body: SamplingBody, num_prompts: int) -> None:
        """Choices come to the engine all at once: more than may wait there would find its queue full every time."""
        limit, setting = self._config.limits.max_choices, "limits.max_choices"
        if self._config.scheduler.max_waiting_requests < limit:
            limit, setting = self._config.scheduler.max_waiting_requests, "scheduler.max_waiting_requests"
        if (body.n or 1) * num_prompts > limit:
            raise APIError(
                f"n = {body.n or 1} for {num_prompts} prompts: at most {limit} choices ({setting}) are accepted in one "
                "request",
                param="n",
                code="invalid_value",
            )

    async def _raw_prompts(self, body: CompletionRequest) -> list[Prompt]:
        self._check_choices(body, len(body.prompts))
        prompts = []
        for index, given in enumerate(body.prompts):
            param = "prompt" if len(body.prompts) == 1 else f"prompt[{index}]"
            if isinstance(given, str):
                encode = partial(self._prompts.encode_text, given, param)
                token_ids = await self._slowly(encode, inline=len(given) < INLINE_CHARACTERS)
            else:
                check = partial(self._prompts.check_token_ids, given, param)
                token_ids = await self._slowly(check, inline=len(given) < INLINE_CHARACTERS)
            prompts.append(self._prompts.build(token_ids, [], param))
        return prompts

    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        self.check_model(body.model)
        if body.messages is not None:
            scope = RequestScope("tokenize", context=spans.UNRECORDED)
            prompt = await self._chat_prompt(
                body.messages, body.add_generation_prompt, body.continue_final_message, scope
            )
            token_ids = list(prompt.token_ids)
        else:
            text = body.prompt or ""
            add_special = body.add_special_tokens is not False
            encode = partial(self._prompts.encode_text, text, "prompt", add_special_tokens=add_special)
            token_ids = await self._slowly(encode, inline=len(text) < INLINE_CHARACTERS)
        strings = [self._tokenizer.token_str(token_id) for token_id in token_ids] if body.return_token_strs else None
        return Tokenized(
            count=len(token_ids),
            max_model_len=self._config.model.max_model_len,
            tokens=token_ids,
            token_strs=strings,
        )

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        self.check_model(body.model)
        limit = self._config.model.max_model_len
        if len(body.tokens) > limit:
            raise APIError(
                f"tokens: {len(body.tokens)} token ids: at most {limit} are accepted (model.max_model_len)",
                param="tokens",
                code="context_length_exceeded",
            )
        for index, token_id in enumerate(body.tokens):
            if token_id >= self._checkpoint.vocab_size:
                raise APIError(
                    f"tokens[{index}] = {token_id}: expected token ids below {self._checkpoint.vocab_size}",
                    param=f"tokens[{index}]",
                    code="invalid_value",
                )
        decode = partial(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return Detokenized(prompt=await self._slowly(decode, inline=len(body.tokens) < INLINE_CHARACTERS))

    async def _chat_prompt(
        self,
        messages: list[Message],
        add_prompt: bool | None,
        continue_final: bool | None,
        scope: RequestScope,
        salt: str | None = None,
    ) -> Prompt:
        sources = find_images(messages)
        limit = self._config.multimodal.max_images_per_prompt
        if len(sources) > limit:
            raise APIError(
                f"messages: {len(sources)} images: at most {limit} are accepted in one request "
                "(multimodal.max_images_per_prompt)",
                param="messages",
                code="too_many_images",
            )
        encode = partial(
            self._prompts.encode_messages,
            messages,
            add_generation_prompt=add_prompt is not False,
            continue_final_message=bool(continue_final),
            trace=scope.context,
        )
        token_ids = await self._slowly(encode, inline=sum(64 + num_characters(m) for m in messages) < INLINE_CHARACTERS)
        self._prompts.check_length(len(token_ids), "messages")  # before any image is looked at

        def check(num_embeddings: int) -> None:  # each image has one placeholder token now
            self._prompts.check_length(len(token_ids) - len(sources) + num_embeddings, "messages")

        loaded = await self._images.load(sources, scope, salt if self._config.multimodal.salt_images else None, check)
        return self._prompts.build(token_ids, loaded, "messages")

    async def _renew(self, scope: RequestScope, mm_hash: str, lost: Any) -> Any:
        """A new reference to the pixels of one of the request's images."""
        return (await self.processor_cache.renew(mm_hash, lost, scope.images[mm_hash])).pixels

    async def _answer(
        self,
        body: SamplingBody,
        style: Format,
        prompts: list[Prompt],
        max_tokens: list[int],
        num_logprobs: int | None,
        scope: RequestScope,
    ) -> Response | AsyncGenerator[bytes, None]:
        n = body.n or 1
        self._check_waiting_tokens(prompts, n)
        answer = Answer(
            id=scope.request_id,
            model=self._config.model.name,
            tokenizer=self._tokenizer,
            num_choices=len(prompts) * n,
            prompt_tokens=[len(prompt.token_ids) for prompt in prompts],
            num_logprobs=num_logprobs,
        )
        if self._config.debug.log_prompts:
            for index, prompt in enumerate(prompts):
                logger.info("request %s: prompt %d = %r", answer.id, index, self._prompts.describe(prompt))
        seed = body.seed if body.seed is not None else random.getrandbits(62)
        choices = []
        for p, prompt in enumerate(prompts):
            siblings = Siblings(n)
            block_hashes = await self._block_hashes(prompt, body.cache_salt)
            for i in range(n):
                sampling = self._sampling(body, max_tokens[p], num_logprobs, (seed + i) % 2**63)
                request = EngineRequest(
                    request_id=f"{answer.id}-{p * n + i}",
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                    arrival_time=scope.arrival_time,
                    mm_items=prompt.mm_items,
                    pixels=prompt.pixels,
                    cache_salt=body.cache_salt,
                    block_hashes=block_hashes,
                    trace_context=dict(scope.headers),
                    mm_cache_queries=scope.mm_cache_queries if i == 0 else 0,
                    mm_cache_hits=scope.mm_cache_hits if i == 0 else 0,
                )
                detokenizer = Detokenizer(self._tokenizer, list(body.stop or ()), sampling.min_tokens)
                counted = RequestMetrics(self._recorder, scope.arrival_clock, len(prompt.token_ids), siblings)
                renew = partial(self._renew, scope)
                choices.append(generation.Choice(p * n + i, request, detokenizer, counted, renew))
        wait_s = self._config.server.engine_wait_s
        deltas = generation.run(self.engine, choices, self._checkpoint.eos_token_ids, wait_s)
        deltas = scope.follow(deltas, sum(answer.prompt_tokens), answer.num_choices)
        if body.stream:
            return answers.stream(answer, style, deltas, include_usage=body.include_usage)
        return await answers.collect(answer, style, deltas)

    async def _block_hashes(self, prompt: Prompt, salt: str | None) -> bytes:
        """Of the prompt's full KV blocks, for the prefix cache."""
        settings = self._config.kv_cache
        if not settings.enable_prefix_caching:
            return b""
        make = partial(prompt_hashes, prompt.token_ids, prompt.mm_items, salt, settings.block_size)
        return bytes(await self._slowly(make, inline=len(prompt.token_ids) < INLINE_CHARACTERS))

    def _check_waiting_tokens(self, prompts: list[Prompt], n: int) -> None:
        """Choices come to the engine all at once: more tokens than may wait there would never fit."""
        limit = self._config.scheduler.max_waiting_tokens
        choices, tokens = len(prompts) * n, sum(len(prompt.token_ids) for prompt in prompts) * n
        if choices > 1 and tokens > limit:
            raise APIError(
                f"n = {n} for {len(prompts)} prompts: at most {limit} prompt tokens over all choices "
                "(scheduler.max_waiting_tokens) are accepted in one request",
                param="n",
                code="invalid_value",
            )

    def _sampling(self, body: SamplingBody, max_tokens: int, num_logprobs: int | None, seed: int) -> SamplingParams:
        """The body's parameters; where it leaves one out the checkpoint's, else OpenAI's default."""
        vocab_size = self._checkpoint.vocab_size
        min_tokens, top_k = body.min_tokens or 0, int(self._value(body, "top_k", 0))
        if min_tokens > max_tokens:
            raise APIError(
                f"min_tokens = {min_tokens}: expected at most max_tokens = {max_tokens}",
                param="min_tokens",
                code="invalid_value",
            )
        stop_token_ids = () if body.ignore_eos else self._checkpoint.eos_token_ids
        for token_id in body.stop_token_ids or ():
            if token_id >= vocab_size:
                raise APIError(
                    f"stop_token_ids: {token_id}: expected token ids below {vocab_size}",
                    param="stop_token_ids",
                    code="invalid_value",
                )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(self._value(body, "temperature", 1.0)),
            top_p=float(self._value(body, "top_p", 1.0)),
            top_k=top_k if 0 < top_k < vocab_size else 0,
            min_p=float(self._value(body, "min_p", 0.0)),
            seed=seed,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=float(self._value(body, "repetition_penalty", 1.0)),
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *(body.stop_token_ids or ())))),
            min_tokens=min_tokens,
            logprobs=num_logprobs,
        )

    def _value(self, body: SamplingBody, name: str, default: float) -> float:
        value = getattr(body, name)
        return self._checkpoint.sampling_defaults.get(name, default) if value is None else value

    async def _slowly(self, work: Callable[[], Any], *, inline: bool) -> Any:
        """The result of `work`, computed in a worker thread unless it is short."""
        return work() if inline else await asyncio.get_running_loop().run_in_executor(self._executor, work)
