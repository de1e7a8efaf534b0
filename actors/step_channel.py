"""How one step's bytes reach every rank and come back. Used by RankGroup and RankActor only.

SocketChannel: a local socket per rank, on which each rank's step loop blocks; a dead rank closes it at once.
ActorCallChannel: one Ray actor call per rank, for a gang that spans nodes.
Both carry the same bytes and raise the same RankFailure.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Protocol


class RankFailure(RuntimeError):
    """A rank died, hung or raised; the whole gang must be restarted."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason


class StepChannel(Protocol):
    def exchange(self, command: bytes, timeout_s: float) -> list[bytes]:
        """Send `command` to every rank; return their answers by rank. Raises RankFailure."""
        ...

    def check(self) -> None:
        """Between steps: raises RankFailure when a rank is known to be gone."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """The scheduler's end: listens on a socket file of its own, one connection per rank."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="tvs-")
        self._authkey = secrets.token_bytes(16)
        self._listener = Listener(os.path.join(self._folder, "s"), "AF_UNIX", backlog=world_size, authkey=self._authkey)
        self._connections: list[Connection] = []
        self._world_size = world_size

    @property
    def address(self) -> tuple[str, bytes]:
        """What a rank needs to connect."""
        return str(self._listener.address), self._authkey

    def accept(self) -> None:
        """Take the connections of all ranks; every rank must be about to connect."""
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self._world_size:
            connection = self._listener.accept()
            by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self._world_size)]

    def exchange(self, command: bytes, timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(command)
            except OSError as error:
                raise RankFailure(rank, f"is gone: {error}") from error
        answers: dict[int, bytes] = {}
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                rank = min(waiting.values())
                raise RankFailure(
                    rank, f"did not answer within {timeout_s:g} s (waiting for {sorted(waiting.values())})"
                )
            for answered in ready:
                rank = waiting.pop(answered)
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(self._world_size)]

    def _receive(self, rank: int) -> bytes:
        try:
            return self._connections[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise RankFailure(rank, "died: its step socket closed") from error

    def check(self) -> None:
        for connection in wait(list(self._connections), timeout=0):
            rank = self._connections.index(connection)  # type: ignore[arg-type]
            self._receive(rank)
            raise RankFailure(rank, "sent an answer that nobody asked for")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve_socket(address: tuple[str, bytes], rank: int, handle: Callable[[bytes], bytes]) -> None:
    """A rank's step loop: blocks on its socket, answers each command, returns when the scheduler's end closes."""
    with Client(address[0], "AF_UNIX", authkey=address[1]) as connection:
        connection.send(rank)
        while True:
            try:
                command = connection.recv_bytes()
                connection.send_bytes(handle(command))
            except (EOFError, ConnectionError):
                return


class ActorCallChannel:
    """One actor call per rank and step; `actors` have a method `handle(bytes) -> bytes`."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors

    def exchange(self, command: bytes, timeout_s: float) -> list[bytes]:
        import ray

        answers = [actor.handle.remote(command) for actor in self._actors]
        ready, missing = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
        for rank, answer in enumerate(answers):
            if answer in ready:
                try:
                    ray.get(answer)
                except ray.exceptions.RayError as error:
                    raise RankFailure(rank, f"died: {error}") from error
        if missing:
            raise RankFailure(answers.index(missing[0]), f"did not answer within {timeout_s:g} s")
        return ray.get(answers)

    def check(self) -> None:
        """An actor's death shows at the next step."""

    def close(self) -> None:
        """Nothing of its own to release."""
