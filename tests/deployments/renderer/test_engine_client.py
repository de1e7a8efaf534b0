"""What the Renderer makes of a Scheduler replica that is lost or not well."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from deployments.renderer.deployment import ServeEngineClient
from deployments.renderer.engine_client import EngineLostError, EngineUnavailableError
from tests.deployments.scheduler.simulation import make_request


class Handle:
    """A deployment handle whose every call raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.cancelled = False
        self.generate = self.ready = self

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, *_: Any) -> "Handle":
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        raise self.error

    async def _to_object_ref_gen(self) -> None:
        """Taken."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise self.error
        yield


def ask(handle: Handle, reader: tuple[str, str] | None = None) -> None:
    async def read() -> None:
        async for _ in ServeEngineClient(handle, reader).generate(make_request("r", 1)):
            pass

    asyncio.run(read())


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("restarting", None)])
def test_a_lost_replica_is_an_engine_that_is_unavailable(error: Exception) -> None:
    handle = Handle(error)
    with pytest.raises(EngineLostError, match="may be sent again"):
        ask(handle)
    assert handle.cancelled


def test_a_request_waits_for_a_replica_up_to_a_limit() -> None:
    class NoReplica(Handle):
        async def _to_object_ref_gen(self) -> None:
            await asyncio.sleep(60)

    async def read(client: ServeEngineClient) -> None:
        async for _ in client.generate(make_request("r", 1)):
            pass

    handle = NoReplica(RuntimeError())
    with pytest.raises(EngineUnavailableError, match=r"within 0\.05 s \(server\.engine_wait_s\)") as raised:
        asyncio.run(asyncio.wait_for(read(ServeEngineClient(handle, wait_s=0.05)), 5))
    assert not isinstance(raised.value, EngineLostError)
    assert handle.cancelled


def test_health_does_not_wait_for_a_replica_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.renderer.deployment.HEALTH_TIMEOUT_S", 0.05)

    class NoReplica(Handle):
        def __await__(self) -> Any:
            return asyncio.sleep(60).__await__()

    assert not asyncio.run(asyncio.wait_for(ServeEngineClient(NoReplica(RuntimeError())).health(), 5))


def test_requests_say_who_reads_them() -> None:
    asked: list[Any] = []

    class Remembers(Handle):
        def remote(self, *arguments: Any) -> "Handle":
            asked.extend(arguments)
            return self

    handle = Remembers(ActorDiedError())
    with pytest.raises(EngineUnavailableError):
        ask(handle, ("renderer", "serve"))
    assert [request.reader for request in asked] == [("renderer", "serve")]


def test_a_call_that_was_given_up_holds_no_pixels() -> None:
    """Serve keeps its arguments until the garbage collector comes by."""
    asked: list[Any] = []

    class NoReplica(Handle):
        def remote(self, *arguments: Any) -> "Handle":
            asked.extend(arguments)
            return self

        async def _to_object_ref_gen(self) -> None:
            await asyncio.sleep(60)

    request = make_request("r", ("a", 4), pixels={"a": "pixels"})

    async def leave() -> None:
        outputs = ServeEngineClient(NoReplica(RuntimeError())).generate(request)
        reading = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.01)
        assert [sent.pixels for sent in asked] == [{"a": "pixels"}]
        reading.cancel()
        await asyncio.wait((reading,))

    asyncio.run(leave())
    assert [sent.pixels for sent in asked] == [{}]
    assert request.pixels == {"a": "pixels"}  # to be sent again


def test_a_bug_of_the_replica_stays_one() -> None:
    with pytest.raises(KeyError):
        ask(Handle(KeyError("x")))


def test_an_engine_that_stopped_is_not_healthy() -> None:
    assert not asyncio.run(ServeEngineClient(Handle(RuntimeError("the engine stopped"))).health())
