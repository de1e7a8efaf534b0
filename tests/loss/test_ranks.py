"""Ranks that die, hang, raise or run out of memory under sixteen streaming clients: a pause, and nothing else.

Two ranks, one engine. What happens at a stage of a step happens there by `debug.fault_dir`: the rank kills or stops
itself for real, or raises.
"""

import math
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.application import Application
from tests.support.clients import (
    MODEL,
    Clients,
    Got,
    blocks,
    check_counters,
    image_message,
    processes,
    restarts,
    samples,
    wait_until,
)
from tests.support.faults import Faults

SEED = 5000
RANKS = 2
HANG_S = 10


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[Application]:
    changes = {
        "parallel": {"world_size": RANKS, "threads_per_rank": 1, "collective_timeout_s": HANG_S},
        "debug": {
            "rank_digest": True,
            "check_invariants": True,
            "fail_on_new_shape": True,
            "fault_dir": str(faults.folder),
        },
        "model": {"max_model_len": 512},
        "kv_cache": {"num_blocks": 768},
        "encoder_cache": {"num_blocks": 64},
        "scheduler": {"max_num_batched_tokens": 256},
        "server": {"development_mode": True},
    }
    for stage in ("load.1", "warm_up.0"):  # of the first start and of the second; the third is well
        faults.ask(stage, "kill")
    with Application("configs/laptop.yaml", changes, tmp_path_factory.mktemp("ranks") / "serve.log") as application:
        yield application


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Got]:
    return Clients(application, SEED).results() + Clients(application, SEED + 100, number=1).results()


def ranks(application: Application) -> list[int]:
    """Process ids of the living ranks."""
    return [process.pid for process in processes(application, "RankActor")]


def restart_lines(application: Application) -> list[str]:
    return re.findall(r"rank .*: gang restarted in .*", application.log.read_text())


def forget_everything(application: Application) -> None:
    """So that images are encoded and prompts computed."""
    for cache in ("prefix", "encoder"):
        application.client.post(f"{application.url}/reset_{cache}_cache", cast_to=object)


def test_a_start_survives_ranks_that_are_killed(application: Application, faults: Faults) -> None:
    log = application.log.read_text()
    assert re.search(r"rank 1 .*loaded: .*; starting the gang again", log)
    assert re.search(r"rank 0 .*; starting the gang again", log)
    assert not faults.left()
    assert sum(restarts(samples(application)).values()) == 2


FAULTS = {
    "killed while it encodes": ({"encode.1": "kill"}, "rank 1 ", ["died"]),
    "killed in prefill": ({"prefill.0": "kill"}, "rank 0 ", ["died"]),
    "killed in decode": ({"decode.1": "kill"}, "rank 1 ", ["died"]),
    "all killed": ({"decode.0": "kill", "decode.1": "kill"}, r"rank \d ", ["died"]),
    "killed again while it loads": ({"decode.1": "kill", "load.0": "kill"}, "rank 1 ", ["died", "died"]),
    "killed again in warm-up": ({"decode.0": "kill", "warm_up.1": "kill"}, "rank 0 ", ["died", "died"]),
    "raises": ({"prefill.1": "raise"}, "rank 1 raised in step .*InjectedError", ["raised"]),
    "out of memory": ({"encode.0": "memory"}, "rank 0 raised in step .*MemoryError", ["raised"]),
    "hangs": ({"decode.1": "stop"}, "rank 1 was missing in step", ["hung"]),
}
"""What happens where, what the log says of it, and the restarts by reason."""


@pytest.mark.parametrize("name", FAULTS)
def test_every_stream_goes_on_as_if_nothing_had_been(
    application: Application, faults: Faults, undisturbed: list[Got], name: str
) -> None:
    files, line, reasons = FAULTS[name]
    before, pids, lines = samples(application), ranks(application), restart_lines(application)
    assert len(pids) == RANKS
    forget_everything(application)
    clients = Clients(application, SEED)
    clients.wait_for_chunks(3)
    for file, fault in files.items():
        faults.ask(file, fault)
    seventeenth = Clients(application, SEED + 100, number=1)  # its image has to be encoded
    assert clients.results() == undisturbed[:-1]
    assert seventeenth.results() == undisturbed[-1:]
    assert not faults.left()

    after = samples(application)
    check_counters(before, after)
    counted = {reason: count - restarts(before)[reason] for reason, count in restarts(after).items()}
    assert {reason: count for reason, count in counted.items() if count} == Counter(reasons)
    (said,) = restart_lines(application)[len(lines) :]
    assert re.match(line, said)
    assert re.search(r"computed again: [1-9]\d* requests, [1-9]\d* tokens; given up: 0 requests", said)
    assert not set(ranks(application)) & set(pids)
    assert len(ranks(application)) == RANKS
    assert blocks(application) == RANKS * (application.args["encoder_cache"]["num_blocks"] - 1)
    assert application.metrics()["vllm:num_requests_running"] == 0
    # Shared memory has a name only while a gang joins, and a gang that was killed meanwhile leaves none.
    wait_until(lambda: not list(Path("/dev/shm").glob("trn-vision-serve-tvs-*")), timeout_s=10, what="no segment")


def test_ranks_killed_from_outside(application: Application, undisturbed: list[Got]) -> None:
    """At no particular stage, and while there is nothing to do as well."""
    clients = Clients(application, SEED)
    clients.wait_for_chunks(10)
    os.kill(ranks(application)[0], signal.SIGKILL)
    assert clients.results() == undisturbed[:-1]
    old = ranks(application)
    os.kill(old[0], signal.SIGKILL)
    wait_until(lambda: len(ranks(application)) == RANKS and not set(ranks(application)) & set(old))
    assert Clients(application, SEED).results() == undisturbed[:-1]


def test_a_killed_renderer_leaves_nothing_behind(application: Application) -> None:
    """Its requests are dropped, also those whose pixels went with it; the ranks and the next request go on."""

    def ask(seed: int) -> None:
        application.client.chat.completions.create(
            model=MODEL, messages=image_message(seed), max_tokens=400, extra_body={"ignore_eos": True}
        )

    def load() -> tuple[float, float]:
        try:
            values = application.metrics()
        except httpx.HTTPError:  # while there is no Renderer
            return (math.nan, math.nan)
        return values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]

    before = ranks(application)
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, seed) for seed in range(100, 124)]
        wait_until(lambda: load()[1] > 0, what="some wait")
        (renderer,) = processes(application, "ServeReplica:trn-vision-serve:Renderer")
        renderer.kill()
        assert all(isinstance(each.exception(), openai.APIError) for each in asked)
    wait_until(lambda: load() == (0, 0), what="its requests are dropped")
    answer = application.client.chat.completions.create(model=MODEL, messages=image_message(200), max_tokens=4)
    assert answer.choices[0].finish_reason is not None
    assert ranks(application) == before


def test_a_gang_that_only_fails_is_given_up_and_its_replica_replaced(
    application: Application, faults: Faults, undisturbed: list[Got]
) -> None:
    clients = Clients(application, SEED)
    clients.wait_for_chunks(5)
    enough = threading.Event()

    def keep_failing() -> None:
        while not enough.wait(0.05):
            faults.ask("warm_up.1", "kill")

    failing = threading.Thread(target=keep_failing)
    failing.start()
    os.kill(ranks(application)[0], signal.SIGKILL)
    wait_until(lambda: "giving up" in application.log.read_text(), what="giving up")
    enough.set()
    failing.join()
    faults.take_back("warm_up.1")
    assert clients.results() == undisturbed[:-1]  # by the replica's successor
    assert "engine stopped" in application.log.read_text()
    wait_until(lambda: len(ranks(application)) == RANKS)
