"""The warm-up as the group sends it: every bucket once, rank 0 first where graphs are compiled, and time for it."""

import msgspec
import pytest

from actors.messages import RankOutput, WarmUp
from actors.plan import make_plan
from actors.rank_group import RankGroup
from configs.engine import parse_config


class Ranks:
    """A step channel whose ranks take a second for each bucket."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: list[tuple[WarmUp, float]] = []

    def send(self, command: bytes) -> None:
        self.command = msgspec.msgpack.decode(command, type=WarmUp)
        self.waited_for = list(range(self.world_size))

    def receive(self, timeout_s: float) -> bytes:
        if len(self.waited_for) == self.world_size:
            self.sent.append((self.command, timeout_s))
        rank, message = self.waited_for.pop(), self.command
        return msgspec.msgpack.encode(
            RankOutput(step_id=message.step_id, rank=rank, timings={message.bucket: 1.0 + rank})
        )


@pytest.mark.parametrize(("device", "head_start_s", "timeout_s"), [("cpu", 0.0, 7.0), ("neuron", 2.0, 900.0)])
def test_every_bucket_is_warmed_once(device: str, head_start_s: float, timeout_s: float) -> None:
    parallel = {"world_size": 2, "device": device, "collective_timeout_s": 7, "compile_timeout_s": 900}
    plan = make_plan(parse_config({"parallel": parallel}))
    reports: list[tuple[str, int, int]] = []
    group = RankGroup(plan, lambda *report: reports.append(report[:3]))
    ranks = Ranks(2)
    group._channel = ranks  # type: ignore[assignment]
    group._warm_up()
    names = plan.bucket_names()
    assert [message.bucket for message, _ in ranks.sent] == names
    assert {message.head_start_s for message, _ in ranks.sent} == {head_start_s}
    assert all(timeout_s < timeout < timeout_s + 5 for _, timeout in ranks.sent)
    assert reports == [("warmed", index + 1, len(names)) for index in range(len(names))]
    assert group.start_figures.compile_seconds == dict.fromkeys(names, 1.0)
