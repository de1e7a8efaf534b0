"""What is asked in the soak, and the answers that were given before anything disturbed them."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from configs import dialogues, digits

MODEL = "digits-vl"
WAYS = ("whole", "whole", "stream", "stream", "stream", "slow", "leaves", "leaves", "leaves early")
PAUSE_S = 0.2
"""Of those that read slowly, behind each event."""


@dataclass(frozen=True)
class Expected:
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass
class Question:
    """One request, as a client sends it, and its answer."""

    body: dict[str, Any]
    expected: Expected | None = None


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """Of all answers that were waited for."""


class Talk:
    """Asks over one connection pool. Greedy and sampled questions of random conversations, long and short answers."""

    def __init__(self, url: str, seed: int, conversations: int) -> None:
        self._url = url
        self._rng = np.random.default_rng(seed)
        self._number = conversations
        self.questions: list[Question] = []
        self.tally = Tally()

    async def prepare(self) -> None:
        """Ask everything once, one after the other, each turn with the answers that were really given before it."""
        sizes = digits.SMALL_SIZES + digits.MEDIUM_SIZES
        async with self._http() as http:
            for number in range(self._number):
                conversation = dialogues.conversation(self._rng, sizes=sizes)
                answers: list[str] = []
                for turn in range(len(conversation.turns)):
                    messages = conversation.messages(turn, answers)
                    greedy = {"messages": messages, "temperature": 0, "max_tokens": 32}
                    answers.append((await self._learn(http, greedy)).text)
                    if turn == number % len(conversation.turns):
                        sampled = {"messages": messages, "temperature": 1.0, "seed": number, "ignore_eos": True}
                        await self._learn(http, sampled | {"max_tokens": int(self._rng.integers(20, 200))})

    async def _learn(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Expected:
        response = await http.post("/v1/chat/completions", json={"model": MODEL, **body})
        answer = response.raise_for_status().json()
        choice = answer["choices"][0]
        usage = answer["usage"]["completion_tokens"]
        expected = Expected(choice["message"]["content"], choice["finish_reason"], usage)
        self.questions.append(Question({"model": MODEL, **body}, expected))
        return expected

    async def run(self, clients: int, until: asyncio.Event) -> None:
        """So many clients ask at random until told to stop; returns when the last has its answer.

        Those that read slowly hurry then.
        """
        await asyncio.gather(*(self._client(random.Random(seed), until) for seed in range(clients)))

    async def _client(self, rng: random.Random, until: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while not until.is_set():
            async with self._http() as http:  # a connection of its own, closed with the request
                question, way = rng.choice(self.questions), rng.choice(WAYS)
                begin = loop.time()
                try:
                    if way == "whole":
                        self._check(question, way, await self._whole(http, question))
                    elif way in ("stream", "slow"):
                        pauses = until if way == "slow" else None
                        self._check(question, way, await self._stream(http, question, pauses))
                    else:
                        await self._leave(http, question, rng, early=way == "leaves early")
                        self.tally.counts[way] += 1
                        continue
                    self.tally.longest_s = max(self.tally.longest_s, loop.time() - begin)
                except Exception as error:
                    self.tally.errors.append(f"{way}: {error!r}")

    def _check(self, question: Question, way: str, answer: Expected) -> None:
        self.tally.counts[way] += 1
        if answer != question.expected:
            self.tally.wrong.append(f"{way}: {answer} instead of {question.expected}")

    async def _whole(self, http: httpx.AsyncClient, question: Question) -> Expected:
        response = await http.post("/v1/chat/completions", json=question.body)
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
        answer = response.json()
        choice = answer["choices"][0]
        return Expected(choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"])

    async def _stream(self, http: httpx.AsyncClient, question: Question, pauses: asyncio.Event | None) -> Expected:
        """Pausing behind each event until `pauses` is set."""
        text, reason, tokens = "", "", 0
        async for chunk in self._chunks(http, question):
            if "error" in chunk:
                raise RuntimeError(f"in the stream: {chunk['error']}")
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if pauses is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(pauses.wait(), PAUSE_S)
        return Expected(text, reason, tokens)

    async def _leave(self, http: httpx.AsyncClient, question: Question, rng: random.Random, early: bool) -> None:
        """Break the connection: while the answer is computed, or behind some of its events."""
        if early:
            try:
                async with asyncio.timeout(rng.random() * 0.5):
                    await self._whole(http, question)
            except TimeoutError:
                return
        events = rng.choice((1, 2, 5, 20))
        async for _ in self._chunks(http, question):
            events -= 1
            if not events:
                return

    async def _chunks(self, http: httpx.AsyncClient, question: Question) -> AsyncIterator[dict[str, Any]]:
        body = question.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=300, trust_env=False, verify=False)
