"""Every implementation of the collectives, with real processes, against what a single process computes.

`xla` runs over a stand-in for torch_xla that carries its calls over gloo.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from actors.neuron_cores import runtime_environment, set_runtime_environment
from configs.engine import ConfigError
from neuron.collectives import CollectiveError, SharedMemoryCollectives, create_collectives, register_collectives
from neuron.collectives.segment import Segment, segment_path
from tests.support import fake_torch_xla

SLOT_BYTES = 4096
"""Small, so that ordinary shapes go in chunks."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((1,), (7,), (3, 5), (2, 3, 4), (64, 17), (1030,), (3, 1100), (4097, 2))
needs_shared_memory = pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")


def make_token(kind: str) -> str:
    if kind == "shared_memory":
        return f"test-{uuid.uuid4().hex}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# What runs on the ranks: importable functions of the collectives.


def join(kind: str, rank: int, world_size: int, token: str, timeout_s: float, slot_bytes: int) -> Any:
    if kind == "shared_memory":
        return SharedMemoryCollectives(rank, world_size, token, timeout_s, slot_bytes)
    if kind == "xla":
        set_runtime_environment(runtime_environment(rank, world_size, "127.0.0.1:62182", [rank]))
        fake_torch_xla.install()
    return create_collectives(kind, rank, world_size, token, timeout_s)


def serve_rank(pipe: Connection) -> None:
    """Join as told by the first message, then run functions of the collectives until the pipe closes."""
    torch.set_num_threads(1)
    try:
        collectives = join(*pipe.recv())
        pipe.send(os.getpid())
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(collectives, *arguments))
        except Exception as error:
            pipe.send(error)


class Gang:
    """Ranks in processes of their own."""

    def __init__(
        self,
        kind: str,
        world_size: int,
        timeout_s: float = 60.0,
        slot_bytes: int = SLOT_BYTES,
        token: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "pytest"])
        token = token or make_token(kind)
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipe.send((kind, rank, world_size, token, timeout_s, slot_bytes))
            self.pipes.append(pipe)
            self.processes.append(process)
        self.pids = [pipe.recv() for pipe in self.pipes]

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None) -> list[Any]:
        """Each rank's result, or the exception it raised."""
        pipes = [self.pipes[rank] for rank in ranks] if ranks is not None else self.pipes
        for pipe in pipes:
            pipe.send((function, arguments))
        return [pipe.recv() for pipe in pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@pytest.fixture(
    scope="module", params=[("shared_memory", 2), ("shared_memory", 4), ("shared_memory", 16), ("gloo", 2), ("xla", 2)]
)
def gang(request: pytest.FixtureRequest) -> Iterator[Gang]:
    gang = Gang(*request.param)
    yield gang
    gang.end()


@pytest.fixture
def make_gang() -> Iterator[Callable[..., Gang]]:
    gangs: list[Gang] = []

    def make(*arguments: Any, **options: Any) -> Gang:
        gangs.append(Gang(*arguments, **options))
        return gangs[-1]

    yield make
    for gang in gangs:
        gang.end()


def make_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    x = torch.randint(-1000, 1000, shape, generator=generator)
    x = x if dtype == torch.int64 else (x / 7).to(dtype)
    if layout == "transposed":
        return x.t().contiguous().t() if x.dim() == 2 else x
    if layout == "strided":
        wide = x.new_zeros((*shape[:-1], shape[-1] * 2))
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def check_against_one_process(collectives: Any) -> list[bytes]:
    """Every operation on many inputs. Returns the reductions' bytes: they must be the same on every rank."""
    rank, world_size = collectives.rank, collectives.world_size
    reduced = []
    for i, shape in enumerate(SHAPES if world_size < 16 else SHAPES[:6]):
        for dtype in DTYPES:
            layout = ("plain", "transposed", "strided")[(i + DTYPES.index(dtype)) % 3]
            inputs = [make_input(peer, shape, dtype, layout) for peer in range(world_size)]
            mine = inputs[rank]
            before = mine.clone()
            total = collectives.all_reduce(mine)
            assert total.dtype == dtype
            assert total.shape == mine.shape
            if dtype == torch.int64:
                assert torch.equal(total, torch.stack(inputs).sum(0))
            else:
                exact = torch.stack(inputs).double().sum(0)
                rounding = torch.finfo(dtype).eps * torch.stack(inputs).double().abs().sum(0) * 2
                assert ((total.double() - exact).abs() <= rounding).all()
            reduced.append(total.flatten().view(torch.uint8).numpy().tobytes())
            for dim in {0, len(shape) - 1, -1}:
                gathered = collectives.all_gather(mine, dim)
                assert gathered.is_contiguous()
                assert torch.equal(gathered, torch.cat(inputs, dim))
            outgoing = [make_input(100 + peer, (world_size, *shape), dtype, layout) for peer in range(world_size)]
            received = collectives.all_to_all(outgoing[rank])
            assert torch.equal(received, torch.stack([each[rank] for each in outgoing]))
            assert torch.equal(mine, before)
        collectives.barrier()
    return reduced


def check_results_are_kept(collectives: Any) -> None:
    """A result is the caller's: later collectives don't change it, nor do changes to it reach them."""
    results = [collectives.all_reduce(torch.full((16,), float(i))) for i in range(6)]
    for i, result in enumerate(results):
        assert (result == i * collectives.world_size).all()
        result.fill_(-1)
    with torch.inference_mode():
        x = torch.ones(5, 5)
        assert (collectives.all_reduce(x) == collectives.world_size).all()
    x = torch.ones(5, 5, requires_grad=True)
    assert not collectives.all_reduce(x).requires_grad
    assert collectives.all_reduce(torch.ones(5, 5)).sum() == 25 * collectives.world_size


def check_many_in_a_row(collectives: Any, count: int) -> None:
    """Ranks of different speed, shapes that change: a slot written too early would show."""
    for i in range(count):
        if (i + collectives.rank) % 97 == 0:
            time.sleep(0.001)
        size = 1 + (i * 37) % 900
        total = collectives.all_reduce(torch.full((size,), i + collectives.rank))
        expected = i * collectives.world_size + sum(range(collectives.world_size))
        assert (total == expected).all()
        if i % 5 == 0:
            received = collectives.all_to_all(torch.full((collectives.world_size, size), i + collectives.rank))
            assert (received == i + torch.arange(collectives.world_size)[:, None]).all()


def run_all_reduce(collectives: Any, size: int = 8) -> torch.Tensor:
    return collectives.all_reduce(torch.ones(size))


def run_timed(collectives: Any) -> tuple[float, Exception]:
    """Seconds until an all_reduce failed."""
    begin = time.monotonic()
    try:
        collectives.all_reduce(torch.ones(8))
    except CollectiveError as error:
        return time.monotonic() - begin, error
    raise AssertionError("the all_reduce came back")


def run_barrier(collectives: Any) -> None:
    collectives.barrier()


def run_close(collectives: Any) -> None:
    collectives.close()
    collectives.close()


def measure_idle_cpu(collectives: Any) -> float:
    """Processor seconds used while a collective waits for its peers."""
    begin = time.process_time()
    with pytest.raises(CollectiveError):
        collectives.barrier()
    return time.process_time() - begin


def test_every_operation_against_one_process(gang: Gang) -> None:
    results = gang.run(check_against_one_process)
    for result in results:
        assert isinstance(result, list), result
        assert result == results[0]


def test_results_belong_to_the_caller(gang: Gang) -> None:
    assert gang.run(check_results_are_kept) == [None] * len(gang.pipes)


def test_many_in_a_row(gang: Gang) -> None:
    assert gang.run(check_many_in_a_row, 1000 if len(gang.pipes) < 16 else 200) == [None] * len(gang.pipes)


@needs_shared_memory
def test_nothing_is_left_in_dev_shm_while_the_gang_lives(make_gang: Callable[..., Gang]) -> None:
    token = make_token("shared_memory")
    gang = make_gang("shared_memory", 2, token=token)
    assert not os.path.exists(segment_path(token))
    assert torch.equal(gang.run(run_all_reduce)[1], torch.full((8,), 2.0))


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
def test_a_gang_of_one(kind: str) -> None:
    collectives = create_collectives(kind, 0, 1, "anything", 1.0)
    x = torch.randn(1, 3)
    for result in (collectives.all_reduce(x), collectives.all_gather(x), collectives.all_to_all(x)):
        assert torch.equal(result, x)
    collectives.barrier()
    collectives.close()
    with pytest.raises(CollectiveError, match="closed"):
        collectives.barrier()


def test_a_dead_rank_is_noticed_at_once(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 4, timeout_s=60.0)
    os.kill(gang.pids[2], signal.SIGKILL)
    for seconds, error in gang.run(run_timed, ranks=[0, 1, 3]):
        assert seconds < 10
        assert error.operation == "all_reduce"
        assert error.missing_ranks == (2,)
    for error in gang.run(run_barrier, ranks=[0, 1, 3]):
        assert isinstance(error, CollectiveError)
        assert "not possible since all_reduce" in str(error)


def test_a_rank_that_dies_while_others_wait(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 2, timeout_s=60.0)
    threading.Timer(0.5, os.kill, (gang.pids[1], signal.SIGKILL)).start()
    [(seconds, error)] = gang.run(run_timed, ranks=[0])
    assert 0.2 < seconds < 10
    assert f"rank 1 (pid {gang.pids[1]}) died" in str(error)


def test_a_hung_rank_is_named_at_the_timeout(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 4, timeout_s=2.0)
    os.kill(gang.pids[1], signal.SIGSTOP)
    for seconds, error in gang.run(run_timed, ranks=[0, 2, 3]):
        assert 1.0 < seconds < 10
        assert error.missing_ranks == (1,)
    # It wakes up late, when all others have arrived: it learns at the next collective that they have given up.
    os.kill(gang.pids[1], signal.SIGCONT)
    gang.run(run_all_reduce, ranks=[1])
    [(seconds, error)] = gang.run(run_timed, ranks=[1])
    assert seconds < 1.9
    assert "a collective failed on ranks [0, 2, 3], missing ranks [1]" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a waiting rank polls")
def test_a_rank_that_waits_does_not_burn_its_core(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 2, timeout_s=2.0)
    [seconds] = gang.run(measure_idle_cpu, ranks=[0])
    assert seconds < 0.4


def test_a_rank_that_left_and_one_that_is_closed(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 2, timeout_s=60.0)
    gang.run(run_close, ranks=[1])
    [(seconds, error)] = gang.run(run_timed, ranks=[0])
    assert seconds < 10
    assert f"rank 1 (pid {gang.pids[1]}) left" in str(error)
    [(_, error)] = gang.run(run_timed, ranks=[1])
    assert "closed" in str(error)


def test_ranks_that_disagree_are_told(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 2, timeout_s=60.0)
    for rank, pipe in enumerate(gang.pipes):
        pipe.send((run_all_reduce, (8 + rank,)))
    errors = [str(pipe.recv()) for pipe in gang.pipes]
    assert any("called something else, or on another shape or dtype" in error for error in errors)
    assert all(error.startswith("all_reduce: ") for error in errors)


def test_gloo_names_the_missing_rank(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("gloo", 2, timeout_s=5.0)
    gang.run(run_all_reduce)
    os.kill(gang.pids[1], signal.SIGKILL)
    [(seconds, error)] = gang.run(run_timed, ranks=[0])
    assert seconds < 20
    assert error.missing_ranks == (1,)


def run_late_barrier(collectives: Any, late: int) -> float:
    """Seconds in a barrier to which rank `late` comes half a second late."""
    if collectives.rank == late:
        time.sleep(0.5)
    begin = time.monotonic()
    collectives.barrier()
    return time.monotonic() - begin


def test_a_barrier_waits_for_every_rank(gang: Gang) -> None:
    early, late = gang.run(run_late_barrier, 1)[:2]
    assert early > 0.3
    assert late < 0.3


def test_xla_names_the_missing_rank(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("xla", 2, timeout_s=5.0)
    os.kill(gang.pids[1], signal.SIGKILL)
    [error] = gang.run(run_barrier, ranks=[0])
    assert isinstance(error, CollectiveError)
    assert error.missing_ranks == (1,)


def test_xla_needs_the_runtime_to_see_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch_xla does without the runtime's variables: it counts one device, and every collective is a copy."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.delenv("NEURON_PJRT_PROCESSES_NUM_DEVICES", raising=False)
    monkeypatch.delenv("NEURON_PJRT_PROCESS_INDEX", raising=False)
    monkeypatch.setattr(torch.distributed, "barrier", torch.distributed.barrier)
    fake_torch_xla.install()
    with pytest.raises(CollectiveError, match="the XLA runtime is device 0 of 1, expected 1 of 2: NEURON_PJRT_PROCESS"):
        create_collectives("xla", 1, 2, make_token("xla"), 1.0)


def test_xla_without_its_packages_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigError, match=r"torch_xla.*install torch-neuronx from AWS's package index"):
        create_collectives("xla", 0, 2, make_token("xla"), 1.0)
    assert create_collectives("xla", 0, 1, make_token("xla"), 1.0).world_size == 1


def run_interrupted(collectives: Any) -> str:
    """An exception in a signal handler, while the rank waits."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        collectives.barrier()
    except KeyboardInterrupt:
        return "interrupted"
    return "went on"


def test_an_interrupted_rank_breaks_the_gang(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang("shared_memory", 2, timeout_s=60.0)
    assert gang.run(run_interrupted, ranks=[0]) == ["interrupted"]
    assert "not possible since barrier: interrupted" in str(gang.run(run_barrier, ranks=[0])[0])
    gang.run(run_barrier, ranks=[1])
    assert "failed on ranks [0]" in str(gang.run(run_barrier, ranks=[1])[0])


@needs_shared_memory
def test_joining_without_peers_ends_and_leaves_nothing() -> None:
    token = make_token("shared_memory")
    with pytest.raises(CollectiveError, match=r"ranks \[1\] did not join") as caught:
        create_collectives("shared_memory", 0, 2, token, 0.2)
    assert caught.value.missing_ranks == (1,)
    assert not os.path.exists(segment_path(token))
    with pytest.raises(CollectiveError, match="rank 0 has not made"):
        create_collectives("shared_memory", 1, 2, token, 0.2)


def start_joining(kind: str, rank: int, world_size: int, token: str) -> None:
    join(kind, rank, world_size, token, 60.0, SLOT_BYTES)


@needs_shared_memory
@pytest.mark.parametrize("joined", [[0], [0, 1]])
def test_what_a_killed_gang_left_is_replaced(make_gang: Callable[..., Gang], joined: list[int]) -> None:
    token = make_token("shared_memory")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    killed = [context.Process(target=start_joining, args=("shared_memory", r, 3, token)) for r in joined]
    for process in killed:
        process.start()
    while not os.path.exists(segment_path(token)):
        time.sleep(0.01)
    time.sleep(0.5)
    for process in killed:
        process.kill()
        process.join()
    assert os.path.exists(segment_path(token))
    gang = make_gang("shared_memory", 3, token=token)
    assert torch.equal(gang.run(run_all_reduce)[2], torch.full((8,), 3.0))
    assert not os.path.exists(segment_path(token))


@needs_shared_memory
def test_a_full_dev_shm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    token = make_token("shared_memory")
    with pytest.raises(CollectiveError, match="has no room for"):
        Segment(0, 2, token, SLOT_BYTES, 1.0)
    assert not os.path.exists(segment_path(token))


def test_arguments_that_cannot_be_right() -> None:
    with pytest.raises(ValueError, match="collectives kind 'mpi': expected one of gloo, shared_memory"):
        create_collectives("mpi", 0, 2, "x", 1.0)
    with pytest.raises(ValueError, match="rank 2: expected 0 <= rank < world_size"):
        create_collectives("gloo", 2, 2, "x", 1.0)
    with pytest.raises(ValueError, match="timeout_s 0"):
        create_collectives("gloo", 0, 2, "x", 0)
    with pytest.raises(ValueError, match=r"rendezvous '\.\./x'"):
        create_collectives("shared_memory", 0, 2, "../x", 1.0)
    alone = create_collectives("shared_memory", 0, 1, "x", 1.0)
    with pytest.raises(ValueError, match="all_to_all of shape"):
        alone.all_to_all(torch.ones(2, 3))
    with pytest.raises(ValueError, match="all_gather dim 2"):
        alone.all_gather(torch.ones(2, 3), 2)


def test_another_kind_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron.collectives._FACTORIES", {})
    register_collectives("alone", lambda rank, world, token, timeout_s: SharedMemoryCollectives(0, 1, token, timeout_s))
    assert create_collectives("alone", 0, 4, "x", 1.0).world_size == 1


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(CollectiveError("barrier", "rank 3 died", [3])))
    assert (str(error), error.missing_ranks) == ("barrier: rank 3 died", (3,))
