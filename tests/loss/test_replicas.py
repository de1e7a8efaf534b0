"""Scheduler replicas that are killed under streaming clients, and the end by SIGTERM.

Two engines of one rank each, behind HAProxy as `make serve` runs them.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.application import Application, free_port
from tests.support.clients import (
    MODEL,
    Clients,
    Got,
    blocks,
    check_counters,
    image_message,
    processes,
    samples,
    wait_until,
)

SEED = 7000
COMMAND = (sys.executable, "-m", "deployments.run")
SCHEDULER = "ServeReplica:trn-vision-serve:Scheduler"


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    changes = {
        "parallel": {"threads_per_rank": 1},
        "debug": {"check_invariants": True, "fail_on_new_shape": True},
        "encoder_cache": {"num_blocks": 64},
    }
    log = tmp_path_factory.mktemp("replicas") / "serve.log"
    # Below pytest's own folders the paths of Ray's sockets are too long.
    ray = tempfile.TemporaryDirectory(prefix="tvs-", ignore_cleanup_errors=True)
    stale = Path(ray.name) / "ray" / "ray_current_cluster"
    stale.parent.mkdir()
    stale.write_text(f"127.0.0.1:{free_port()}")
    environment = {
        "RAY_TMPDIR": ray.name,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    }
    replicas = {"Renderer": 1, "Scheduler": 2}
    with ray, Application("configs/laptop.yaml", changes, log, environment, replicas, COMMAND) as application:
        wait_until(lambda: len(processes(application, "RankActor")) == 2)
        yield application


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Got]:
    return Clients(application, SEED).results()


def test_two_applications_on_a_machine_answer_their_own_clients_only(application: Application, tmp_path: Path) -> None:
    """From the first moment on that the second one says it is healthy, with HAProxy's ports left to it."""
    changes = {"model": {"max_model_len": 1024}, "parallel": {"threads_per_rank": 1}}
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    before = application.metrics()["vllm:request_success"]
    with Application("configs/laptop.yaml", changes, tmp_path / "log", environment, command=COMMAND) as second:
        for _ in range(8):
            second.client.completions.create(model=MODEL, prompt="Hello!", max_tokens=2)
            application.client.completions.create(model=MODEL, prompt="Hello!", max_tokens=2)
        assert second.metrics()["vllm:request_success"] == 8
        assert application.metrics()["vllm:request_success"] == before + 8


def wait_for_replicas(application: Application, old: list[psutil.Process]) -> None:
    """Until two engines serve, none of which was one of `old`."""
    gone = {process.pid for process in old}
    capacity = 2 * (application.args["encoder_cache"]["num_blocks"] - 1)

    def complete() -> bool:
        living = {process.pid for process in processes(application, SCHEDULER)}
        return len(living) == 2 and not living & gone and blocks(application) == capacity

    wait_until(complete, what="two replicas")


def test_every_engine_of_the_node_is_connected(application: Application) -> None:
    (renderer,) = processes(application, "ServeReplica:trn-vision-serve:Renderer")

    def sockets() -> list[str]:
        return [address for each in renderer.net_connections("unix") if "tvs-outputs-" in (address := str(each.laddr))]

    wait_until(lambda: len(sockets()) == 3)  # one that listens


def test_a_dead_cluster_is_not_waited_for(application: Application) -> None:
    """The file that it left names it still."""
    assert "ray_current_cluster names a Ray cluster at" in application.log.read_text()


def test_requests_of_a_killed_replica_go_on_at_the_other(application: Application, undisturbed: list[Got]) -> None:
    before = samples(application)
    clients = Clients(application, SEED)
    clients.wait_for_chunks(10)
    running = samples(application)
    replica = processes(application, SCHEDULER)[0]
    replica.kill()
    assert clients.results() == undisturbed
    # Its rank ends with it, so the gauges are those of the one that lives; nothing was counted back or twice.
    capacity = application.args["encoder_cache"]["num_blocks"] - 1
    wait_until(lambda: blocks(application) == capacity, timeout_s=10, what="the dead rank's gauges are gone")
    after = samples(application)
    check_counters(before, after)
    check_counters(running, after)
    prompts = "vllm:prompt_tokens_total"
    growth = sum(after[key] - before[key] for key in after if key[0] == prompts)
    assert growth == sum(got.prompt_tokens for got in undisturbed)
    ended = [key for key in after if key[0] == "vllm:request_success_total"]
    assert {dict(key[1])["finished_reason"]: after[key] - before[key] for key in ended if after[key] > before[key]} == {
        "length": len(undisturbed)
    }
    wait_for_replicas(application, [replica])


def test_without_any_engine_requests_wait_for_the_next(application: Application, undisturbed: list[Got]) -> None:
    """Those in the middle of their answers, and those that come meanwhile."""
    clients = Clients(application, SEED)
    clients.wait_for_chunks(5)
    replicas = processes(application, SCHEDULER)
    for replica in replicas:
        replica.kill()
    late = Clients(application, SEED)
    assert clients.results() == undisturbed
    assert late.results() == undisturbed
    wait_for_replicas(application, replicas)


def test_sigterm_lets_what_runs_finish(application: Application, undisturbed: list[Got]) -> None:
    """The last test of this application."""
    clients = Clients(application, SEED)
    clients.wait_for_chunks(5)
    everything = psutil.Process(application.pid).children(recursive=True)
    ranks = processes(application, "RankActor")
    os.kill(application.pid, signal.SIGTERM)

    def ask() -> httpx.Response:
        body = {"model": MODEL, "messages": image_message(1), "max_tokens": 2}
        return httpx.post(f"{application.url}/v1/chat/completions", content=json.dumps(body), timeout=60)

    wait_until(lambda: ask().status_code == 503, what="new requests are refused")
    refused = ask()
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "shutting_down"
    assert clients.results() == undisturbed
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(application.wait, 60).result()
    assert time.monotonic() - begin < 20  # by Serve's default the idle Renderer alone would wait for 30
    _, alive = psutil.wait_procs(everything, timeout=10)
    assert not {process.pid for process in alive} & {process.pid for process in ranks}
    left = [" ".join(process.cmdline()) for process in alive]
    assert not [command for command in left if "ray::" in command or "haproxy" in command]
    assert "0 requests were not finished in time" in application.log.read_text()
