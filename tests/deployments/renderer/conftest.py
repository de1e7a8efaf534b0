"""A Renderer over a fake engine, plain and behind HTTP."""

import asyncio
import base64
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import httpx
import openai
import pytest
import uvicorn
from PIL import Image

from configs.engine import EngineConfig, parse_config
from deployments.renderer.checkpoint import Checkpoint, load_checkpoint
from deployments.renderer.routes import build_api
from deployments.renderer.serving import Renderer
from deployments.renderer.tokenizer import PromptTokenizer
from tests.deployments.renderer.fake_engine import Counters, FakeEngine


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return load_checkpoint(EngineConfig())


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> PromptTokenizer:
    return PromptTokenizer(checkpoint.tokenizer)


@dataclass
class Served:
    """An application that listens on `url`."""

    url: str
    engine: FakeEngine
    counters: Counters
    renderer: Renderer

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    @cached_property
    def http(self) -> httpx.Client:
        return self.connect()

    def connect(self) -> httpx.Client:
        """A client of one's own, to close."""
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=False)


@pytest.fixture(scope="session")
def serve(checkpoint: Checkpoint) -> Iterator[Callable[..., Served]]:
    """Starts an application with the given settings."""
    servers: list[tuple[uvicorn.Server, threading.Thread, Renderer]] = []

    def start(**settings: dict) -> Served:
        config = parse_config(settings)
        engine, counters = FakeEngine(), Counters()
        renderer = Renderer(config, checkpoint, engine, counters)
        api = build_api(renderer, config, lambda: (b"a_metric 1\n", "text/plain; version=0.0.4"))
        server = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=0, lifespan="off", log_level="warning"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        servers.append((server, thread, renderer))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Served(f"http://127.0.0.1:{port}", engine, counters, renderer)

    yield start
    for server, thread, renderer in servers:
        server.should_exit = True
        server.force_exit = True
        thread.join(5)
        renderer.close()


@pytest.fixture(scope="session")
def _shared(serve: Callable[..., Served]) -> Served:
    server = {"development_mode": True, "max_body_bytes": 2 * 1024**2, "engine_wait_s": 0.2}
    return serve(model={"max_model_len": 512}, server=server)


@pytest.fixture
def served(_shared: Served) -> Served:
    """The application of most tests: at most 512 tokens, bodies of 2 MB, development mode."""
    fresh = FakeEngine()
    _shared.engine.__dict__.update(fresh.__dict__)
    _shared.counters.__dict__.update(Counters().__dict__)
    _shared.renderer.processor_cache.reset()
    return _shared


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes, media_type: str = "image/png") -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(content, media_type)}}


def picture(width: int = 96, height: int = 64, seed: int = 0) -> Image.Image:
    """A smooth coloured picture, another for each seed."""
    gradient = Image.linear_gradient("L").resize((width, height))
    other = gradient.transpose(Image.Transpose.FLIP_TOP_BOTTOM).rotate(90, expand=False)
    return Image.merge("RGB", (gradient, other, gradient.point(lambda value: (value * 3 + 40 * seed) % 256)))
