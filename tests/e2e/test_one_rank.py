"""One rank behind Serve's own proxy: the start's report, and a rank that is killed while it answers."""

import os
import signal
import time

import numpy as np
import psutil

from configs import digits
from tests.support.application import Application

MODEL = "digits-vl"


def ranks(application: Application) -> list[psutil.Process]:
    """The living rank processes of this application."""
    serve = psutil.Process(application.pid)
    return [child for child in serve.children(recursive=True) if "RankActor" in " ".join(child.cmdline())]


def test_the_start_is_reported_stage_by_stage(one_rank: Application) -> None:
    # The ready line comes once the application has answered through its proxy: not before the fixture may see that.
    deadline = time.monotonic() + 30
    while "ready: " not in (log := one_rank.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    stages = ["plan: ", "start: gang placed", "start: weights loaded", "start: buckets warmed", "ready: "]
    positions = [log.index(stage) for stage in stages]
    assert positions == sorted(positions)
    assert f"{one_rank.url}/v1/chat/completions" in log[positions[-1] :]


def test_a_killed_rank_loses_nothing(one_rank: Application) -> None:
    """The stream pauses while the gang starts anew, and ends as an undisturbed one does."""
    rng = np.random.default_rng(4)
    picture = digits.strip(digits.scans_of([2, 7], rng), (128, 64), rng)
    image = {"type": "image_url", "image_url": {"url": digits.data_url(picture)}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "Read the digits."}]}]

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
