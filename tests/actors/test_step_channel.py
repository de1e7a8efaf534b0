"""The local step channel: real processes, killed and stopped."""

import multiprocessing
import os
import signal
import time

import pytest

from actors.step_channel import RankFailure, SocketChannel, serve_socket

TIMEOUT_S = 2.0
CONTEXT = multiprocessing.get_context("spawn")


def echo(command: bytes) -> bytes:
    return b"%d:" % os.getpid() + command


def run_rank(address: tuple[str, bytes], rank: int) -> None:
    serve_socket(address, rank, echo)


@pytest.fixture
def gang():
    channel = SocketChannel(3, TIMEOUT_S)
    processes = [CONTEXT.Process(target=run_rank, args=(channel.address, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    channel.accept(60)
    yield channel, processes
    channel.close()
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(10)
        assert not process.is_alive()


def exchange(channel: SocketChannel, command: bytes) -> set[bytes]:
    channel.send(command)
    answers = set()
    while channel.waited_for:
        answer = channel.receive(10)
        assert answer is not None
        answers.add(answer)
    return answers


def test_every_rank_answers(gang) -> None:
    channel, processes = gang
    for command in (b"a", b"b" * 2_000_000):
        assert exchange(channel, command) == {b"%d:" % process.pid + command for process in processes}
    channel.check()


def test_a_killed_rank_is_named_at_once(gang) -> None:
    channel, processes = gang
    processes[1].kill()
    processes[1].join()
    with pytest.raises(RankFailure) as raised:
        channel.check()
    assert (raised.value.rank, raised.value.kind) == (1, "died")
    begin = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        exchange(channel, b"a")
    assert raised.value.rank == 1
    assert time.monotonic() - begin < 5


def test_a_stopped_rank_is_the_one_that_is_waited_for(gang) -> None:
    channel, processes = gang
    os.kill(processes[2].pid, signal.SIGSTOP)
    channel.send(b"a")
    assert channel.receive(10)
    assert channel.receive(10)
    assert channel.receive(0.3) is None
    assert channel.waited_for == [2]


def test_a_stopped_rank_does_not_hold_who_sends(gang) -> None:
    """More than a socket holds."""
    channel, processes = gang
    os.kill(processes[0].pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0 did not read its command within 2 s") as raised:
        channel.send(b"a" * 2_000_000)
    assert raised.value.kind == "hung"
    assert time.monotonic() - begin < 3 * TIMEOUT_S


def test_a_rank_that_never_connects_is_named() -> None:
    channel = SocketChannel(1, TIMEOUT_S)
    with pytest.raises(RankFailure, match=r"rank 0 did not connect within 0\.2 s"):
        channel.accept(0.2)
    channel.close()
