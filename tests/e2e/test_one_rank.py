"""One rank behind Serve's own proxy: the start's report, and the way of the tokens."""

import time

from tests.soak.watch import open_pixels
from tests.support.application import Application
from tests.support.clients import MODEL, image_message, processes


def test_the_start_is_reported_stage_by_stage(one_rank: Application) -> None:
    # The ready line comes once the application has answered through its proxy: not before the fixture may see that.
    deadline = time.monotonic() + 30
    while "ready: " not in (log := one_rank.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    stages = ["plan: ", "start: gang placed", "start: weights loaded", "start: buckets warmed", "ready: "]
    positions = [log.index(stage) for stage in stages]
    assert positions == sorted(positions)
    assert f"{one_rank.url}/v1/chat/completions" in log[positions[-1] :]


def test_requests_and_tokens_go_over_a_local_socket(one_rank: Application) -> None:
    """On one node, and not as a call of Serve and items of its stream, as with the sixteen ranks of these tests."""
    with one_rank.client.chat.completions.create(
        model=MODEL, messages=image_message(3), max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert set(open_pixels(one_rank)) == {"Renderer", "Scheduler"}, "a call of Serve brings references of Ray's"
    (renderer,) = processes(one_rank, "ServeReplica:trn-vision-serve:Renderer")
    sockets = [each.laddr for each in renderer.net_connections("unix") if "tvs-outputs-" in str(each.laddr)]
    assert len(sockets) == 2, "the one that listens, and the engine's"
    assert len(set(sockets)) == 1
    deadline = time.monotonic() + 10
    while (holders := set(open_pixels(one_rank))) != {"Renderer"} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert holders == {"Renderer"}, "between requests its cache alone holds pixels"
