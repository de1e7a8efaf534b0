"""The soak's verdict on what it measured."""

from dataclasses import replace

import pytest

from tests.soak.leaks import FILES, OWN_MB, RAYS_MB, THREADS, Holding, Quiet, leaks
from tests.soak.watch import errors_in

RENDERER, RAYLET = Holding(300.0, 60, 40), Holding(80.0, 90, 50)
FIRST = Quiet({"Renderer": RENDERER, "raylet": RAYLET}, 1000.0, 1, 1, {"running": 0.0, "free": 46.0})


def after(**changes: object) -> Quiet:
    return replace(FIRST, **changes)


def test_what_has_not_grown_is_no_leak() -> None:
    assert leaks(FIRST, FIRST) == []
    settled = {"Renderer": Holding(300.0 + OWN_MB, 60 + FILES, 40 + THREADS), "raylet": Holding(80.0 + RAYS_MB, 1, 1)}
    assert leaks(FIRST, after(processes=settled)) == []


@pytest.mark.parametrize(("files", "found"), [(200, []), (201, ["log monitor: open files grew by 201, more than 200"])])
def test_the_log_monitor_holds_the_logs_of_ranks_that_ended(files: int, found: list[str]) -> None:
    monitor = Holding(46.0, 35, 14)
    first = after(processes={"log monitor": monitor})
    assert leaks(first, after(processes={"log monitor": replace(monitor, files=35 + files)})) == found


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (after(processes={"Renderer": replace(RENDERER, memory_mb=333.0)}), "Renderer: memory grew by 33 MB"),
        (after(processes={"Renderer": replace(RENDERER, files=77)}), "Renderer: open files grew by 17"),
        (after(processes={"Renderer": replace(RENDERER, threads=49)}), "Renderer: threads grew by 9"),
        (after(processes={"Renderer": RENDERER, "raylet": replace(RAYLET, memory_mb=190.0)}), "raylet: memory grew"),
        (after(processes={"raylet": RAYLET}), "Renderer: it is gone"),
        (after(object_store_bytes=99_304.0), "object store: 1,000 bytes before, 99,304 after"),
        (after(shared_memory=2), "segments in /dev/shm: 1 before, 2 after"),
        (after(folders=2), "temporary folders: 1 before, 2 after"),
        (after(gauges={"running": 0.0, "free": 45.0}), "free: 46 before, 45 after"),
    ],
)
def test_what_has_grown_is_named(last: Quiet, says: str) -> None:
    [found] = leaks(FIRST, last)
    assert says in found


def test_errors_in_the_log_that_nobody_caused() -> None:
    killed = "ERROR trn_vision_serve: rank 1 died: its step socket closed; restarting the gang, 3 requests"
    bug = "ERROR asyncio: Task exception was never retrieved"
    assert errors_in(f"INFO ready\n{killed}\n{bug}\nTraceback (most recent call last):\n") == [
        bug,
        "Traceback (most recent call last):",
    ]
