"""The local step channel: real processes, killed and stopped."""

import multiprocessing
import os
import signal
import time

import pytest

from actors.step_channel import RankFailure, SocketChannel, serve_socket

CONTEXT = multiprocessing.get_context("spawn")


def echo(command: bytes) -> bytes:
    return b"%d:" % os.getpid() + command


def run_rank(address: tuple[str, bytes], rank: int) -> None:
    serve_socket(address, rank, echo)


@pytest.fixture
def gang():
    channel = SocketChannel(3)
    processes = [CONTEXT.Process(target=run_rank, args=(channel.address, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    channel.accept()
    yield channel, processes
    channel.close()
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(10)
        assert not process.is_alive()


def test_answers_come_back_by_rank(gang) -> None:
    channel, processes = gang
    for command in (b"a", b"b" * 2_000_000):
        assert channel.exchange(command, 10) == [b"%d:" % process.pid + command for process in processes]
    channel.check()


def test_a_killed_rank_is_named_at_once(gang) -> None:
    channel, processes = gang
    processes[1].kill()
    processes[1].join()
    with pytest.raises(RankFailure) as raised:
        channel.check()
    assert raised.value.rank == 1
    begin = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        channel.exchange(b"a", 30)
    assert raised.value.rank == 1
    assert time.monotonic() - begin < 5


def test_a_stopped_rank_is_named_after_the_timeout(gang) -> None:
    channel, processes = gang
    os.kill(processes[2].pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match=r"rank 2 did not answer within 0\.5 s"):
        channel.exchange(b"a", 0.5)
