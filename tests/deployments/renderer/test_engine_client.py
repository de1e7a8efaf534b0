"""What the Renderer makes of a Scheduler replica that is lost or not well."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.messages import EngineOutput, EngineRequest
from deployments.renderer.deployment import ServeEngineClient
from deployments.renderer.engine_client import EngineLostError, EngineUnavailableError
from deployments.renderer.local_engines import LocalEngines
from deployments.renderer.stored_pixels import StoredPixels, files_of
from deployments.scheduler.local_renderers import LocalRenderers
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


class NoRequests:
    healthy = True

    def submit(self, *_: Any) -> None:
        pytest.fail("submitted")

    def abort(self, _: str) -> None: ...


class SendsBeside(Handle):
    """A call without items, of which the outputs come over the socket once it has ended."""

    def __init__(self, *outputs: EngineOutput) -> None:
        super().__init__(RuntimeError())
        self.outputs = outputs
        self.request = make_request("r", 1)

    def remote(self, request: EngineRequest) -> Handle:
        self.request = request
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(self._send()))
        return
        yield

    async def _send(self) -> None:
        sender = await LocalRenderers(NoRequests()).to(self.request.outputs_to)
        assert sender is not None
        for output in self.outputs:
            sender.put(output)


def read_beside(handle: Handle) -> list[EngineOutput]:
    async def read() -> list[EngineOutput]:
        local = LocalEngines()
        await local.start()
        client = ServeEngineClient(handle, local=local)
        outputs = [output async for output in client.generate(make_request("r", 1))]
        assert not local._receiving
        local.close()
        return outputs

    return asyncio.run(asyncio.wait_for(read(), 5))


def test_outputs_may_come_behind_the_end_of_their_call() -> None:
    outputs = EngineOutput(request_id="r", token_ids=(1,)), EngineOutput(request_id="r", finish_reason="stop")
    (both,) = read_beside(SendsBeside(*outputs))
    assert (both.token_ids, both.finish_reason) == ((1,), "stop")


def test_a_call_that_ended_without_its_last_output_is_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.renderer.deployment.LAST_OUTPUT_TIMEOUT_S", 0.2)
    handle = SendsBeside(EngineOutput(request_id="r", token_ids=(1,)))
    with pytest.raises(EngineLostError, match="ended before its outputs did"):
        read_beside(handle)
    assert handle.cancelled


def test_an_engine_that_cannot_reach_the_socket_answers_the_call() -> None:
    class Answers(SendsBeside):
        async def __aiter__(self) -> AsyncIterator[Any]:
            for output in self.outputs:
                yield output

    end = EngineOutput(request_id="r", finish_reason="stop")
    assert read_beside(Answers(end)) == [end]


def test_a_bug_of_the_replica_stays_one() -> None:
    with pytest.raises(KeyError):
        ask(Handle(KeyError("x")))


def test_an_engine_that_stopped_is_not_healthy() -> None:
    assert not asyncio.run(ServeEngineClient(Handle(RuntimeError("the engine stopped"))).health())


class AtOnce:
    """An engine that ends every request at once."""

    healthy = True

    def submit(self, request: EngineRequest, on_output: Any) -> None:
        assert set(request.pixels) == {"a"}
        on_output(EngineOutput(request_id=request.request_id, finish_reason="stop"))

    def abort(self, _: str) -> None: ...


def test_an_engine_of_this_node_gets_requests_without_serve_up_to_a_limit() -> None:
    put: list[np.ndarray] = []
    called: list[EngineRequest] = []

    class Serve(Handle):
        def remote(self, request: EngineRequest) -> Handle:
            called.append(msgspec.structs.replace(request, pixels=dict(request.pixels)))
            return self

        async def __aiter__(self) -> AsyncIterator[Any]:
            yield EngineOutput(request_id=called[-1].request_id, finish_reason="length")

    def store(pixels: np.ndarray) -> str:
        put.append(pixels.copy())
        return f"reference {len(put)}"

    async def generate() -> None:
        local = LocalEngines()
        await local.start()
        pixels = {"a": StoredPixels(np.ones((4, 3), np.float32), store)}
        request = make_request("r", 1, ("a", 4), pixels=pixels)
        client = ServeEngineClient(Serve(RuntimeError()), local=local, max_local=1)

        async def ends() -> list[Any]:
            return [output.finish_reason async for output in client.generate(request)]

        assert await ends() == ["length"], "nobody is connected"
        await LocalRenderers(AtOnce()).to(local.address)
        while not local._engines:
            await asyncio.sleep(0)
        assert await ends() == ["stop"]
        engine = local.choose(1)
        assert engine is not None
        engine.requests.add("another")
        assert await ends() == ["length"]
        local.close()

    asyncio.run(asyncio.wait_for(generate(), 10))
    assert [request.pixels for request in called] == [{"a": "reference 1"}] * 2
    assert [array.tolist() for array in put] == [np.ones((4, 3)).tolist()]


def test_pixels_for_which_no_descriptors_are_left_are_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.renderer.stored_pixels._SHARE_OF_DESCRIPTORS", 0)
    stored = StoredPixels(np.ones((4, 3), np.float32), lambda _: "reference")
    assert stored.memory is None
    assert stored.reference() == "reference"
    assert files_of({"a": stored}) is None
