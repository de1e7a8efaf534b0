"""One rank behind Serve's own proxy: the start's report, and a rank that is killed while it answers."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import numpy as np
import openai
import psutil

from configs import digits
from tests.support.application import Application

MODEL = "digits-vl"


def processes(application: Application, name: str) -> list[psutil.Process]:
    """The living processes of this application that Ray calls so."""
    serve = psutil.Process(application.pid)
    return [child for child in serve.children(recursive=True) if name in " ".join(child.cmdline())]


def ranks(application: Application) -> list[psutil.Process]:
    return processes(application, "RankActor")


def images_of(seed: int) -> list[dict]:
    """A message with an image of its own."""
    rng = np.random.default_rng(seed)
    picture = digits.strip(digits.scans_of([2, 7], rng), (128, 64), rng)
    image = {"type": "image_url", "image_url": {"url": digits.data_url(picture)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "Read the digits."}]}]


def test_the_start_is_reported_stage_by_stage(one_rank: Application) -> None:
    # The ready line comes once the application has answered through its proxy: not before the fixture may see that.
    deadline = time.monotonic() + 30
    while "ready: " not in (log := one_rank.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    stages = ["plan: ", "start: gang placed", "start: weights loaded", "start: buckets warmed", "ready: "]
    positions = [log.index(stage) for stage in stages]
    assert positions == sorted(positions)
    assert f"{one_rank.url}/v1/chat/completions" in log[positions[-1] :]


def test_tokens_come_over_a_local_socket(one_rank: Application) -> None:
    """On one node, and not as items of a Serve stream, which is how the sixteen ranks of these tests send them."""
    one_rank.client.chat.completions.create(model=MODEL, messages=images_of(3), max_tokens=2)
    (renderer,) = processes(one_rank, "ServeReplica:trn-vision-serve:Renderer")
    sockets = [each.laddr for each in renderer.net_connections("unix") if "tvs-outputs-" in str(each.laddr)]
    assert len(sockets) == 2, "the one that listens, and the engine's"
    assert len(set(sockets)) == 1


def test_a_killed_rank_loses_nothing(one_rank: Application) -> None:
    """The stream pauses while the gang starts anew, and ends as an undisturbed one does."""
    messages = images_of(4)

    def stream():
        return one_rank.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=400, temperature=1.0, seed=5, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    undisturbed = [chunk.choices[0].delta.content or "" for chunk in stream() if chunk.choices]
    before = ranks(one_rank)
    assert len(before) == 1
    got: list[str] = []
    for chunk in stream():
        if chunk.choices:
            got.append(chunk.choices[0].delta.content or "")
        if len(got) == 20:
            os.kill(before[0].pid, signal.SIGKILL)
    assert "".join(got) == "".join(undisturbed)
    after = ranks(one_rank)
    assert [process.pid for process in after] != [before[0].pid]
    # The dead rank's gauges are gone: the blocks add up to one rank's.
    values = one_rank.metrics()
    states = ("active", "free", "held")
    total = sum(values[f"vllm_neuron:device_encoder_cache_{state}_blocks"] for state in states)
    assert total == one_rank.args["encoder_cache"]["num_blocks"] - 1


def test_a_killed_renderer_leaves_nothing_behind(one_rank: Application) -> None:
    """Its requests are dropped, also those whose pixels went with it; the ranks and the next request go on."""

    def ask(seed: int) -> None:
        one_rank.client.chat.completions.create(
            model=MODEL, messages=images_of(seed), max_tokens=2000, extra_body={"ignore_eos": True}
        )

    def load() -> tuple[float, float]:
        values = one_rank.metrics()
        return values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]

    def settles(wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while True:
            with suppress(httpx.HTTPError):  # while there is no Renderer
                if wanted():
                    return
            assert time.monotonic() < deadline
            time.sleep(0.2)

    before = [process.pid for process in ranks(one_rank)]
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, seed) for seed in range(100, 124)]
        settles(lambda: load()[1] > 0)
        (renderer,) = processes(one_rank, "ServeReplica:trn-vision-serve:Renderer")
        renderer.kill()
        assert all(isinstance(each.exception(), openai.APIError) for each in asked)
    settles(lambda: load() == (0, 0))
    answer = one_rank.client.chat.completions.create(model=MODEL, messages=images_of(200), max_tokens=4)
    assert answer.choices[0].finish_reason is not None
    assert [process.pid for process in ranks(one_rank)] == before
