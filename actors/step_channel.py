"""How one step's bytes reach every rank and come back. Used by RankGroup and RankActor only.

SocketChannel: a local socket per rank, on which each rank's step loop blocks; a dead rank closes it at once.
ActorCallChannel: one Ray actor call per rank, for a gang that spans nodes.
Both carry the same bytes and raise the same RankFailure.
"""

import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, Literal, Protocol, get_args

FailureKind = Literal["died", "hung", "raised", "differs"]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


class RankFailure(RuntimeError):
    """A rank died, hung or raised, or differs from the others; the whole gang must be restarted."""

    def __init__(self, rank: int, reason: str, kind: FailureKind = "died", details: str = "") -> None:
        """`rank`: -1 where it is not known. `reason`: one line. `details`: a traceback."""
        super().__init__(f"rank {rank} {reason}" if rank >= 0 else f"a rank {reason}")
        self.rank = rank
        self.reason = reason
        self.kind = kind
        self.details = details


class StepChannel(Protocol):
    """One command at a time: `send` it to every rank, then `receive` until nobody is `waited_for`."""

    def send(self, command: bytes) -> None:
        """Raises RankFailure."""
        ...

    def receive(self, timeout_s: float) -> bytes | None:
        """The next answer, of any rank; None when none came in time. Raises RankFailure."""
        ...

    @property
    def waited_for(self) -> list[int]:
        """Ranks that have not answered, ascending."""
        ...

    def check(self) -> None:
        """Between steps: raises RankFailure when a rank is known to be gone."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """The scheduler's end: listens on a socket file of its own, one connection per rank."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        """`timeout_s`: a rank that stops in the middle of a message holds its peer no longer."""
        self._timeout_s = timeout_s
        self._folder = tempfile.mkdtemp(prefix="tvs-")
        self._authkey = secrets.token_bytes(16)
        self._listener = Listener(os.path.join(self._folder, "s"), "AF_UNIX", backlog=world_size, authkey=self._authkey)
        self._connections: list[Connection] = []
        self._waiting: dict[Any, int] = {}
        """Connection -> rank, of those that have not answered."""
        self._world_size = world_size

    @property
    def address(self) -> tuple[str, bytes]:
        """What a rank needs to connect."""
        return str(self._listener.address), self._authkey

    def accept(self, timeout_s: float) -> None:
        """Take the connections of all ranks; every rank must be about to connect. Raises RankFailure."""
        by_rank: dict[int, Connection] = {}

        def take() -> None:
            with suppress(OSError, EOFError):  # closed: nobody waits for it any more
                while len(by_rank) < self._world_size:
                    connection = self._listener.accept()
                    by_rank[connection.recv()] = connection

        # On a thread: a rank that hangs in the middle of connecting would hold `accept` for ever.
        taking = threading.Thread(target=take, name="accept ranks", daemon=True)
        taking.start()
        taking.join(timeout_s)
        missing = sorted(set(range(self._world_size)) - set(by_rank))
        if missing:
            raise RankFailure(missing[0], f"did not connect within {timeout_s:g} s (ranks {missing} did not)", "hung")
        self._connections = [by_rank[rank] for rank in range(self._world_size)]
        for connection in self._connections:
            _limit(connection, self._timeout_s)

    def send(self, command: bytes) -> None:
        self._waiting = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(command)
            except BlockingIOError:
                raise RankFailure(rank, f"did not read its command within {self._timeout_s:g} s", "hung") from None
            except OSError as error:
                raise RankFailure(rank, f"is gone: {error}") from error
            self._waiting[connection] = rank

    def receive(self, timeout_s: float) -> bytes | None:
        ready = wait(list(self._waiting), timeout=max(0.0, timeout_s))
        if not ready:
            return None
        return self._receive(self._waiting.pop(ready[0]))

    @property
    def waited_for(self) -> list[int]:
        return sorted(self._waiting.values())

    def _receive(self, rank: int) -> bytes:
        try:
            return self._connections[rank].recv_bytes()
        except BlockingIOError:
            raise RankFailure(rank, f"did not end its answer within {self._timeout_s:g} s", "hung") from None
        except (EOFError, OSError) as error:
            raise RankFailure(rank, "died: its step socket closed") from error

    def check(self) -> None:
        for connection in wait(list(self._connections), timeout=0):
            rank = self._connections.index(connection)  # type: ignore[arg-type]  # `wait` gives back what it got
            self._receive(rank)
            raise RankFailure(rank, "sent an answer that nobody asked for", "differs")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _limit(connection: Connection, timeout_s: float) -> None:
    """From now on reading and writing raise BlockingIOError where the other end does nothing for so long."""
    seconds = int(timeout_s)
    value = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


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
        self._waiting: dict[Any, int] = {}
        """Answer to come -> rank."""

    def send(self, command: bytes) -> None:
        self._waiting = {actor.handle.remote(command): rank for rank, actor in enumerate(self._actors)}

    def receive(self, timeout_s: float) -> bytes | None:
        import ray

        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=max(0.0, timeout_s))
        if not ready:
            return None
        rank = self._waiting.pop(ready[0])
        try:
            answer: bytes = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            raise RankFailure(rank, f"died: {first_line(error)}", details=str(error)) from error
        return answer

    @property
    def waited_for(self) -> list[int]:
        return sorted(self._waiting.values())

    def check(self) -> None:
        """An actor's death shows at the next step."""

    def close(self) -> None:
        """Nothing of its own to release."""


def first_line(error: object) -> str:
    """Of what is said in many, for a log line."""
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))
