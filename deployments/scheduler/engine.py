"""Engine: the loop that turns requests into steps, and steps into streamed tokens. Plain threads, no Ray.

One thread owns the Scheduler and the gang; `submit`, `abort` and the resets are messages to that thread.
"""

import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from actors.messages import EngineOutput, EngineRequest, RankOutput, SchedulerOutput
from actors.step_channel import RankFailure
from deployments.output_buffer import OutputBuffer
from deployments.scheduler.crash_loop import MAX_FAILURES, CrashLoop
from deployments.scheduler.request import RequestError
from deployments.scheduler.scheduler import Scheduler, SchedulerStats
from deployments.scheduler.stats import EngineStats, has_token
from deployments.scheduler.timeline import Timeline

logger = logging.getLogger("trn_vision_serve")

IDLE_CHECK_S = 1.0
"""How often an idle engine looks whether its gang is alive."""

OnOutput = Callable[[EngineOutput], None]


class Gang(Protocol):
    """What the engine needs of a RankGroup."""

    def step(
        self,
        output: SchedulerOutput,
        pixels: dict[str, Any],
        items: list[tuple[str, int]],
        meanwhile: Callable[[], None],
    ) -> RankOutput:
        """`meanwhile` is called once the ranks have the step."""

    def check(self) -> None: ...
    def restart(self) -> None: ...
    def shutdown(self) -> None: ...


@dataclass
class _Live:
    """A request that the engine has not finished."""

    request: EngineRequest
    on_output: OnOutput
    timeline: Timeline


class _Stepped(NamedTuple):
    """What a step came to, to be told while the next one runs."""

    output: SchedulerOutput
    answer: RankOutput
    stats: SchedulerStats
    results: list[EngineOutput]
    at: float
    """When its tokens were there, monotonic seconds."""


class Engine:
    """Runs one Scheduler over one gang. `start` begins the loop; `stop` ends it and the gang."""

    def __init__(
        self,
        scheduler: Scheduler,
        gang: Gang,
        stats: EngineStats,
        check_invariants: bool = False,
        find_lost: Callable[[dict[str, Any]], list[str]] = lambda pixels: [],
    ) -> None:
        """`find_lost`: of references to pixels by mm_hash, those that lead to nothing."""
        self._scheduler = scheduler
        self._gang = gang
        self._stats = stats
        self._check_invariants = check_invariants
        self._find_lost = find_lost
        self._crash_loop = CrashLoop(time.monotonic())
        self._live: dict[str, _Live] = {}
        self._untold: _Stepped | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False
        """Nobody reads the inbox any more: changed, and the inbox written to, under `_ending`."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: BaseException | None = None
        """Why the loop ended, when it was not stopped."""

    # Any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step in flight, then the gang. Requests that are left end with an error."""
        self._send(None)
        self._thread.join()
        self._gang.shutdown()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: EngineRequest, on_output: OnOutput) -> None:
        """Queue a request; `on_output` is called from the engine's thread, last with a finish reason."""
        live = _Live(request, on_output, Timeline(request, time.monotonic()))
        self._send(lambda: self._add(live))

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """`submit` for asyncio: yields the request's outputs, those merged that came while nobody read.

        Closing the iterator early aborts the request.
        """
        outputs = OutputBuffer()
        self.submit(request, outputs.put)
        try:
            while (output := await outputs.get()) is not None:
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing happens when it has finished already."""
        self._send(lambda: self._abort(request_id))

    def drop(self, request_id: str) -> None:
        """As `abort`, but its stream ends too, with the reason "abort"."""

        def drop() -> None:
            live = self._live.get(request_id)
            if live is not None:
                self._abort(request_id)
                live.on_output(EngineOutput(request_id=request_id, finish_reason="abort"))

        self._send(drop)

    def call(self, function: Callable[[Scheduler], Any]) -> "Future[Any]":
        """Run `function` on the scheduler between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if self._ended:
                    raise RuntimeError(self._why_ended())
                future.set_result(function(self._scheduler))
            except Exception as error:
                future.set_exception(error)

        self._send(run)
        return future

    def _send(self, message: Callable[[], None] | None) -> None:
        """A message for the engine's thread; None: stop. Once that has ended, messages see `_ended` and act on it."""
        with self._ending:
            if not self._ended:
                self._inbox.put(message)
                return
        if message is not None:
            message()

    def _why_ended(self) -> str:
        return "the engine was stopped" if self.failure is None else f"the engine stopped: {self.failure}"

    # The engine's thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("engine stopped")
            self.failure = error
        finally:
            self._end()

    def _loop(self) -> None:
        stepped = True
        while self._take_messages(wait=not stepped):
            try:
                stepped = self._step()
                self._stats.log_if_due(time.monotonic())
            except RankFailure as failure:
                self._recover(failure)
                stepped = True

    def _take_messages(self, wait: bool) -> bool:
        """Run what was sent; `wait`: for the first message, or until the scheduler may go on. False: stop."""
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=self._idle_timeout() if wait else None)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            wait = False

    def _idle_timeout(self) -> float:
        wakeup = self._scheduler.next_wakeup()
        return IDLE_CHECK_S if wakeup is None else min(IDLE_CHECK_S, max(0.0, wakeup - time.monotonic()))

    def _step(self) -> bool:
        """Run the next step; False when there is nothing to do before a message comes or a hold window ends."""
        output = self._scheduler.schedule(time.monotonic())
        if output is None:
            self._tell()
            self._gang.check()
            self._stats.record_idle(self._scheduler)
            return False
        for request_id in output.num_scheduled_tokens:
            self._live[request_id].timeline.on_scheduled(output.clock)
        pixels, items = self._encoder_work(output)
        for mm_hash in self._find_lost(pixels) if pixels else ():
            del pixels[mm_hash]
            self._give_back(mm_hash)
        answer = self._gang.step(output, pixels, items, self._tell)
        if answer.sampled:
            self._crash_loop.served()
        results = self._scheduler.update_from_output(output, answer.sampled)
        self._untold = _Stepped(output, answer, self._scheduler.take_stats(), results, time.monotonic())
        if self._check_invariants:
            self._scheduler.check_integrity()
        return True

    def _tell(self) -> None:
        """Count the latest step, then send its tokens: a client that has its answer finds it counted."""
        step, self._untold = self._untold, None
        if step is not None:
            self._stats.record_step(step.output, step.answer, step.stats)
            for result in step.results:
                self._deliver(result, step.at)

    def _encoder_work(self, output: SchedulerOutput) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """References to the pixels and (mm_hash, patches) of the images to encode, in the message's order."""
        pixels: dict[str, Any] = {}
        items: list[tuple[str, int]] = []
        for request_id, indices in output.scheduled_encoder_inputs.items():
            request = self._live[request_id].request
            for index in indices:
                item = request.mm_items[index]
                t, h, w = item.grid
                items.append((item.mm_hash, t * h * w))
                pixels[item.mm_hash] = request.pixels[item.mm_hash]
        return pixels, items

    def _give_back(self, mm_hash: str) -> None:
        """An image's pixels are gone: whoever sent the requests that need it can make them anew.

        The step runs all the same, since the ranks are about to be told of it; what it computes for them is dropped.
        """
        self._tell()
        error = f"the pixels of image {mm_hash} were lost"
        request_ids = self._scheduler.forget_image(mm_hash)
        logger.warning("%s: %d requests go back to their Renderers", error, len(request_ids))
        for request_id in request_ids:
            self._refuse(self._live.pop(request_id), error, 503, lost_mm_hashes=(mm_hash,))

    def _add(self, live: _Live) -> None:
        if self._ended:
            self._refuse(live, self._why_ended(), 503)
            return
        missing = tuple(item.mm_hash for item in live.request.mm_items if item.mm_hash not in live.request.pixels)
        if missing:  # its Renderer gave it up on the way here
            self._refuse(live, "the request came without its images' pixels", 503, lost_mm_hashes=missing)
            return
        self._stats.record_arrival(live.request)
        try:
            self._scheduler.add_request(live.request)
        except RequestError as error:
            self._refuse(live, str(error), error.status, error.retry_after_s)
            return
        self._live[live.request.request_id] = live

    def _refuse(
        self,
        live: _Live,
        error: str,
        status: int,
        retry_after_s: float | None = None,
        lost_mm_hashes: tuple[str, ...] = (),
    ) -> None:
        """The request ends here with an error. With 503 it may go on elsewhere, where its times are recorded."""
        self._stats.record_end(live.timeline, time.monotonic(), counts=status != 503)
        live.on_output(
            EngineOutput(
                request_id=live.request.request_id,
                finish_reason="error",
                error=error,
                error_status=status,
                retry_after_s=retry_after_s,
                lost_mm_hashes=lost_mm_hashes,
            )
        )

    def _abort(self, request_id: str) -> None:
        if self._ended:
            return
        live = self._live.pop(request_id, None)
        if live is not None:
            self._scheduler.abort_request(request_id)
            self._stats.record_end(live.timeline, time.monotonic())

    def _deliver(self, output: EngineOutput, at: float) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        if has_token(output):
            live.timeline.on_token(at)
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._stats.record_end(live.timeline, at)
        live.on_output(output)

    def _recover(self, failure: RankFailure) -> None:
        """Start the gang anew and compute again what was lost with it. Raises RankFailure from a crash loop."""
        self._tell()
        begin = time.monotonic()
        lost = self._scheduler.recover()
        for output in lost.given_up:
            self._deliver(output, begin)
        cause, given_up = failure, bool(lost.given_up)
        while True:
            logger.error("%s; restarting the gang%s", failure, f"\n{failure.details}" if failure.details else "")
            if self._crash_loop.failed(time.monotonic(), given_up):
                logger.error("the gang failed %d times without serving a request: giving up", MAX_FAILURES)
                raise failure
            self._stats.record_restart(failure)
            try:
                self._gang.restart()
                break
            except RankFailure as again:
                failure, given_up = again, False
        now = time.monotonic()
        self._crash_loop.restarted(now)
        logger.warning(
            "%s: gang restarted in %.1f s; computed again: %d requests, %d tokens; given up: %d requests",
            *(cause, now - begin, lost.num_requests, lost.num_tokens, len(lost.given_up)),
        )

    def _end(self) -> None:
        """Nothing is computed any more: whoever waits for something hears of it, and who comes later too."""
        with suppress(Exception):
            self._tell()
        with self._ending:
            self._ended = True
        for request_id, live in list(self._live.items()):
            with suppress(Exception):  # what ended the loop may be the scheduler's own contradiction
                self._scheduler.abort_request(request_id)
            self._refuse(live, self._why_ended(), 503)
        self._live.clear()
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                break
            if message is not None:
                message()
        with suppress(Exception):
            self._stats.record_idle(self._scheduler)
