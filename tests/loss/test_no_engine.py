"""The only Scheduler replica is killed and does not come back in time; then it does.

The rank of the replica that follows it stops where it loads, for as long as the tests want.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.application import Application
from tests.support.clients import MODEL, image_message, processes, samples, wait_until
from tests.support.faults import Faults
from tests.support.raw_client import RawClient

ENGINE_WAIT_S = 4
SCHEDULER = "ServeReplica:trn-vision-serve:Scheduler"
BODY = {"model": MODEL, "messages": image_message(9000), "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[Application]:
    changes = {
        "server": {"engine_wait_s": ENGINE_WAIT_S},
        "debug": {"check_invariants": True, "fail_on_new_shape": True, "fault_dir": str(faults.folder)},
        "encoder_cache": {"num_blocks": 64},
    }
    log = tmp_path_factory.mktemp("no-engine") / "serve.log"
    with Application("configs/laptop.yaml", changes, log) as application:
        yield application


def ask(application: Application, **changes: Any) -> httpx.Response:
    return httpx.post(f"{application.url}/v1/chat/completions", json=BODY | {"max_tokens": 20} | changes, timeout=60)


def stopped(application: Application) -> psutil.Process | None:
    """The rank that waits."""
    ranks = processes(application, "RankActor")
    return next((rank for rank in ranks if rank.status() == psutil.STATUS_STOPPED), None)


def test_503_until_there_is_an_engine_again(application: Application, faults: Faults) -> None:
    before = ask(application).json()["choices"]
    streaming = RawClient(application.port)
    streaming.send("/v1/chat/completions", BODY | {"max_tokens": 3000, "stream": True})
    events = streaming.events()
    begun = [next(events) for _ in range(5)]
    assert not [event for event in begun if "error" in event]

    faults.ask("load.0", "stop")
    (scheduler,) = processes(application, SCHEDULER)
    scheduler.kill()
    begin = time.monotonic()
    with ThreadPoolExecutor() as pool:
        whole, stream = pool.submit(ask, application), pool.submit(ask, application, stream=True)
        *_, last = events
        for answer in (whole.result(), stream.result()):  # of the stream not even the head had been sent
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "engine_unavailable"
            assert "server.engine_wait_s" in answer.json()["error"]["message"]
    assert last["error"]["code"] == "engine_unavailable"
    assert ENGINE_WAIT_S <= time.monotonic() - begin < 3 * ENGINE_WAIT_S
    assert httpx.get(f"{application.url}/health", timeout=30).status_code == 503

    wait_until(lambda: stopped(application) is not None, what="the next replica's rank stops where it loads")
    assert ask(application).status_code == 503
    rank = stopped(application)
    assert rank is not None
    os.kill(rank.pid, signal.SIGCONT)
    wait_until(lambda: httpx.get(f"{application.url}/health", timeout=30).status_code == 200, what="an engine")
    assert ask(application).json()["choices"] == before
    idle = [value for key, value in samples(application).items() if key[0].startswith("vllm:num_requests_")]
    assert sum(idle) == 0
