"""The Renderer deployment: the HTTP ingress. A thin shell over `serving.Renderer` and its FastAPI routes."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import numpy as np

from actors.messages import EngineOutput, EngineRequest
from configs.engine import EngineConfig
from deployments.output_buffer import read_ahead
from deployments.renderer.announce import announce
from deployments.renderer.draining import Drain, DrainMiddleware
from deployments.renderer.engine_client import EngineLostError, EngineUnavailableError
from deployments.renderer.local_engines import LocalEngines, Receiving
from deployments.renderer.stored_pixels import StoredPixels, files_of, references_of
from telemetry import prometheus, spans
from telemetry.logs import configure
from telemetry.recorder import ENGINE, create_recorder, replica_tags

logger = logging.getLogger("trn_vision_serve")

LAST_OUTPUT_TIMEOUT_S = 10.0
"""A call has ended, and its last output, sent before that over the socket, is still to be read."""

MEET_S = 10.0
"""Between two looks for engines that have come."""

HEALTH_TIMEOUT_S = 2.0
"""Without a replica of the Scheduler a call waits for one; who asks for /health wants an answer."""


class ServeEngineClient:
    """EngineClient over the Scheduler deployment's handle, and over local sockets to engines on this node."""

    def __init__(
        self,
        handle: Any,
        reader: tuple[str, str] | None = None,
        wait_s: float = 120.0,
        local: LocalEngines | None = None,
        max_local: int = 0,
    ) -> None:
        """`reader`: name and namespace of this process's actor. `wait_s`: for a replica that takes a request.
        `local`: engines on this node, each of which gets up to `max_local` requests at a time from here by itself."""
        # Pixels travel as object references inside the request, so requests go by actor call, not by Serve's gRPC.
        self._handle = handle.options(_by_reference=True)
        self._stream = handle.options(stream=True, _by_reference=True)
        self._reader = reader
        self._wait_s = wait_s
        self._local = local or LocalEngines()
        self._max_local = max_local

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        engine = self._local.choose(self._max_local, with_pixels=bool(request.pixels))
        files = None if engine is None else files_of(request.pixels)
        if engine is None or files is None:
            generating = self._call(request)
        else:
            generating = self._local.generate(engine, request, files)
        async with aclosing(generating) as outputs:
            async for output in outputs:
                yield output

    async def _call(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """By Serve, to one of all engines."""
        # Serve's router keeps a call that was cancelled before a replica had it in a reference cycle, and a process at
        # rest collects none: what it is given of the pixels is taken back when the call ends.
        pixels = await references_of(request.pixels)
        address = self._address
        request = msgspec.structs.replace(request, reader=self._reader, outputs_to=address, pixels=pixels)
        with self._local.receiving(request.request_id) as receiving:
            response = self._stream.generate.remote(request)
            try:
                await self._taken(response)
                items = response if address is None else _until_complete(response, receiving)
                async with aclosing(read_ahead(items, receiving.buffer)) as outputs:
                    async for output in outputs:
                        yield output
            except Exception as error:
                if _is_loss(error):
                    raise EngineLostError("the engine was lost; the request may be sent again") from error
                raise
            finally:
                response.cancel()
                pixels.clear()

    @property
    def _address(self) -> str | None:
        return self._local.address if self._local.started else None

    async def _taken(self, response: Any) -> None:
        """Returns once a replica has the request: a handle would wait for one for ever."""
        try:
            async with asyncio.timeout(self._wait_s):
                await response._to_object_ref_gen()
        except TimeoutError:
            raise EngineUnavailableError(
                f"no engine took the request within {self._wait_s:g} s (server.engine_wait_s)"
            ) from None

    async def reset_prefix_cache(self) -> None:
        await self._handle.reset_prefix_cache.remote()

    async def reset_encoder_cache(self) -> None:
        await self._handle.reset_encoder_cache.remote()

    async def ready(self) -> None:
        """Waits for a replica, however long that takes. Raises what the engine stopped with."""
        await self._handle.ready.remote(self._address)

    async def meet(self) -> None:
        """For ever: engines that come to this node connect here, so that all of them share its requests."""
        while True:
            try:
                await self._handle.broadcast("ready", self._address).results_async(timeout_s=MEET_S)
            except Exception as error:  # one that starts, or ends, answers the next time
                logger.debug("an engine did not answer: %r", error)
            await asyncio.sleep(MEET_S)

    async def health(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.ready()
            return True
        except Exception as error:
            logger.warning("the engine is not ready: %r", error)
            return False


async def _until_complete(items: AsyncIterator[EngineOutput], receiving: Receiving) -> AsyncIterator[EngineOutput]:
    """The outputs that come as items of the call, if any do. Ends when the last output is here, whichever way it came.

    What comes over the socket was sent before the call ended, but may be read a moment later.
    """
    async for output in items:
        yield output
        if output.finish_reason is not None:
            return
    try:
        async with asyncio.timeout(LAST_OUTPUT_TIMEOUT_S):
            await receiving.complete.wait()
    except TimeoutError:
        raise EngineLostError("the engine's call ended before its outputs did") from None


def _is_loss(error: Exception) -> bool:
    """Whether the replica behind a handle is gone, or none takes the call; other errors are its own."""
    from ray import exceptions
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.NodeDiedError
        | exceptions.ObjectLostError
        | exceptions.TaskCancelledError
        | exceptions.WorkerCrashedError
        | BackPressureError
        | DeploymentUnavailableError
        | ReplicaUnavailableError,
    )


class RendererDeployment:
    """Waits for the engine in its constructor, so that the ingress is ready only when it can answer."""

    async def __init__(self, config: EngineConfig, scheduler: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        import ray

        from deployments.renderer.checkpoint import load_checkpoint
        from deployments.renderer.routes import build_api
        from deployments.renderer.serving import Renderer

        configure()
        spans.configure("renderer", config.telemetry.spans_file)
        checkpoint = load_checkpoint(config, hide_torch=True)
        context = ray.get_runtime_context()
        name = context.get_actor_name()
        assert name is not None, "Serve names its replicas"
        local = LocalEngines()
        store: Callable[[np.ndarray], Any] = ray.put
        if config.server.engine_channel == "auto" and sys.platform == "linux":  # others have no abstract sockets
            await local.start()
            store = partial(StoredPixels, put=ray.put)
        reader = name, context.namespace
        engine = ServeEngineClient(scheduler, reader, config.server.engine_wait_s, local, config.scheduler.max_num_seqs)
        recorder = create_recorder(config.model, ENGINE, replica_tags())
        self._renderer = Renderer(config, checkpoint, engine, recorder, store=store)
        self._api = build_api(self._renderer, config, prometheus.render)
        self._drain = Drain()
        self._api.add_middleware(DrainMiddleware, drain=self._drain)
        await engine.ready()
        if local.started:
            self._meeting = asyncio.ensure_future(engine.meet())
        with_key = config.server.needs_key
        threading.Thread(target=announce, args=(config.model.name, with_key), name="announce", daemon=True).start()

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests; returns how many of those at hand are not finished after `timeout_s`."""
        return await self._drain.finish(timeout_s)

    def __serve_build_asgi_app__(self) -> Any:
        return self._api

    def __del__(self) -> None:
        """Serve calls this when it stops the replica."""
        renderer = getattr(self, "_renderer", None)
        if renderer is not None:
            renderer.close()
        spans.shutdown()
