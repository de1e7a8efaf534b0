"""The event loops on which both ends run."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from tests.support.local_channel import Run


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """On either loop: Ray's actors run on uvloop's."""

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, 20))

    return run
