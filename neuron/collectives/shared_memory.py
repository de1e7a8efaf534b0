"""Collectives of ranks on one CPU host, through shared memory.

Each rank writes its part into its slot, the ranks meet, and each reads what it needs. Slots come in two sets that
meetings use in turn: a rank that writes for meeting s+1 has passed meeting s, which every rank reaches only after it
read what it wanted of meeting s-1, the last to use that set. So one meeting per collective is enough.

NOTE on memory order. A rank stores data and then its arrival; the last to arrive stores the generation; a rank that
sees the generation loads data. x86-64 keeps stores in order and loads in order, so only the store of the own arrival
before the loads of the others' needs a fence: without it the last two ranks might each miss the other. Python has no
fence, but a lock's acquire and release are atomic operations, which x86-64 orders fully. Elsewhere (ARM) every one of
these steps needs the fence, and one pair is not enough, as it lets accesses into the locked region from both sides;
two pairs in a row are, since an acquire is never moved before an earlier release.
"""

import os
import platform
import threading
import time
import zlib
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from neuron.collectives.futex import Futex
from neuron.collectives.interface import CollectiveError
from neuron.collectives.segment import GENERATION_OFFSET, Segment, Status

DEFAULT_SLOT_BYTES = 512 * 1024
"""Larger messages go in chunks of it. Sixteen ranks take 17 MiB of /dev/shm, of which containers often have 64."""
_DIRECT_BYTES = 1024 * 1024
"""Up to so many bytes of all ranks together each rank sums everything itself; above, each sums its share for all.
Measured: the second meeting that shares need costs more than the additional reading up to about here."""
_SLEEP_S = 0.01
"""The longest sleep between two looks at the peers."""
_SPINS = 200
"""Looks at the generation, each after a sched_yield, before a rank sleeps, where every rank has a core of its own."""
_MAX_VIEWS = 512
"""Shapes whose views are kept."""
_TOTAL_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")
_IN_FLOAT32 = (torch.bfloat16, torch.float16)
"""Summed in float32 and rounded once."""
_SUMMABLE = (*_IN_FLOAT32, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Views:
    """Typed views of the two sets of slots, for one collective on one shape and dtype. Index: the set."""

    def __init__(self, segment: Segment, operation: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.signature = _signature(operation, shape, dtype)
        self.nbytes = shape.numel() * dtype.itemsize
        self.mine: list[Tensor] = []
        """[*shape]: this rank's slot."""
        self.all: list[Tensor] = []
        """[world_size, *shape]: every slot, in rank order."""
        self.arrays: list[np.ndarray] = []
        """`all` as numpy arrays, for all_reduce in the dtypes that numpy has."""
        if self.nbytes > segment.slot_bytes:
            return
        with torch.inference_mode(False):
            for slots in segment.slots:
                every = slots[:, : self.nbytes].view(dtype).view(segment.world_size, *shape)
                self.all.append(every)
                self.mine.append(every[segment.rank])
                if operation == "all_reduce" and dtype not in _IN_FLOAT32:
                    self.arrays.append(every.view(segment.world_size, -1).numpy())


class SharedMemoryCollectives:
    """Collectives over a Segment. A gang of one touches no shared memory and returns its inputs.

    rendezvous: see `segment_path`; a new one per gang. slot_bytes: the same on every rank.
    """

    def __init__(
        self, rank: int, world_size: int, rendezvous: str, timeout_s: float, slot_bytes: int = DEFAULT_SLOT_BYTES
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._error: CollectiveError | None = None
        self._sequence = 0
        """Of this rank's last meeting; its lowest bit says which set of slots that meeting used."""
        self._views: dict[tuple[str, torch.Size, torch.dtype], _Views] = {}
        self._fence_lock = threading.Lock()
        self._barrier_signature = _signature("barrier", torch.Size(), torch.uint8)
        self._spins = _SPINS if world_size <= _usable_cores() else 0
        self._segment: Segment | None = None
        if world_size > 1:
            self._segment = Segment(rank, world_size, rendezvous, slot_bytes, timeout_s)
            self._futex = Futex(self._segment.memory, GENERATION_OFFSET, min(_SLEEP_S, timeout_s))
            self._peers = [(rank + i) % world_size for i in range(1, world_size)]

    # Collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        segment = self._usable("all_reduce")
        if segment is None:
            return x
        if x.numel() == 0:
            return torch.empty_like(x)
        views = self._views.get(("all_reduce", x.shape, x.dtype))
        if views is None:
            if x.dtype not in _SUMMABLE:
                raise ValueError(f"all_reduce of {x.dtype}: expected one of {', '.join(map(str, _SUMMABLE))}")
            views = self._make_views("all_reduce", x)
        if views.nbytes > segment.slot_bytes or views.nbytes * self.world_size > _DIRECT_BYTES:
            return self._all_reduce_by_shares(segment, x, views.signature)
        which = (self._sequence + 1) & 1
        views.mine[which].copy_(x.detach() if x.requires_grad else x)
        self._meet("all_reduce", views.signature)
        if views.arrays:
            return torch.from_numpy(_sum_ranks(views.arrays[which])).view(x.shape)
        total = _sum_ranks(views.all[which].view(self.world_size, -1).float().numpy())
        return torch.from_numpy(total).to(x.dtype).view(x.shape)

    def _all_reduce_by_shares(self, segment: Segment, x: Tensor, signature: int) -> Tensor:
        """Reduce-scatter and all-gather, chunk by chunk; a chunk's gathering meets together with the next's writing."""
        flat = x.detach().reshape(-1)
        total = torch.empty(flat.shape, dtype=x.dtype)
        slots, results = segment.slots.view(x.dtype), segment.results.view(x.dtype)
        chunk = slots.shape[2]
        chunks = [(flat[i : i + chunk], total[i : i + chunk]) for i in range(0, flat.numel(), chunk)]
        which = (self._sequence + 1) & 1
        slots[which, self.rank, : chunks[0][0].numel()].copy_(chunks[0][0])
        self._meet("all_reduce", signature)
        for i, (part, reduced) in enumerate(chunks):
            begin, end = self._share(part.numel(), x.dtype)
            inputs, output = slots[which, :, begin:end], results[which, begin:end]
            if x.dtype in _IN_FLOAT32:
                output.copy_(torch.from_numpy(_sum_ranks(inputs.float().numpy())))
            else:
                _sum_ranks(inputs.numpy(), output.numpy())
            if i + 1 < len(chunks):
                following = chunks[i + 1][0]
                slots[1 - which, self.rank, : following.numel()].copy_(following)
            self._meet("all_reduce", signature)
            reduced.copy_(results[which, : part.numel()])
            which = 1 - which
        return total.view(x.shape)

    def _share(self, elements: int, dtype: torch.dtype) -> tuple[int, int]:
        """[begin, end) of the elements that this rank sums; shares start on cache lines."""
        line = 64 // dtype.itemsize
        share = -(-elements // (self.world_size * line)) * line
        return min(self.rank * share, elements), min((self.rank + 1) * share, elements)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"all_gather dim {dim}: expected a dimension of a tensor of shape {tuple(x.shape)}")
        segment = self._usable("all_gather")
        if segment is None:
            return x
        views = self._views.get(("all_gather", x.shape, x.dtype)) or self._make_views("all_gather", x)
        dim %= x.dim()
        shape = (*x.shape[:dim], self.world_size * x.shape[dim], *x.shape[dim + 1 :])
        result = torch.empty(shape, dtype=x.dtype)
        if views.nbytes == 0:
            return result
        if views.nbytes <= segment.slot_bytes:
            which = (self._sequence + 1) & 1
            views.mine[which].copy_(x.detach() if x.requires_grad else x)
            self._meet("all_gather", views.signature)
            by_rank = result.view(*x.shape[:dim], self.world_size, *x.shape[dim:])
            by_rank.copy_(views.all[which].movedim(0, dim))
            return result
        # A tile of [before, behind] at a time, where x is [before, behind] and the result [before, world_size, behind].
        before = x.shape[:dim].numel()
        tiled, gathered = x.detach().reshape(before, -1), result.view(before, self.world_size, -1)
        slots = segment.slots.view(x.dtype)
        columns = min(tiled.shape[1], slots.shape[2])
        rows = slots.shape[2] // columns
        for top in range(0, before, rows):
            for left in range(0, tiled.shape[1], columns):
                tile = tiled[top : top + rows, left : left + columns]
                which = (self._sequence + 1) & 1
                every = slots[which, :, : tile.numel()].view(self.world_size, *tile.shape)
                every[self.rank].copy_(tile)
                self._meet("all_gather", views.signature)
                gathered[top : top + rows, :, left : left + columns].copy_(every.movedim(0, 1))
        return result

    def all_to_all(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[0] != self.world_size:
            raise ValueError(f"all_to_all of shape {tuple(x.shape)}: expected [{self.world_size}, ...]")
        segment = self._usable("all_to_all")
        if segment is None:
            return x
        views = self._views.get(("all_to_all", x.shape, x.dtype)) or self._make_views("all_to_all", x)
        result = torch.empty(x.shape, dtype=x.dtype)
        if views.nbytes == 0:
            return result
        if views.nbytes <= segment.slot_bytes:
            which = (self._sequence + 1) & 1
            views.mine[which].copy_(x.detach() if x.requires_grad else x)
            self._meet("all_to_all", views.signature)
            return result.copy_(views.all[which][:, self.rank])
        rows, received = x.detach().reshape(self.world_size, -1), result.view(self.world_size, -1)
        slots = segment.slots.view(x.dtype)
        chunk = slots.shape[2] // self.world_size
        squares = slots[:, :, : chunk * self.world_size].view(2, self.world_size, self.world_size, chunk)
        for begin in range(0, rows.shape[1], chunk):
            part = rows[:, begin : begin + chunk]
            which = (self._sequence + 1) & 1
            squares[which, self.rank, :, : part.shape[1]].copy_(part)
            self._meet("all_to_all", views.signature)
            received[:, begin : begin + chunk].copy_(squares[which, :, self.rank, : part.shape[1]])
        return result

    def barrier(self) -> None:
        if self._usable("barrier") is not None:
            self._meet("barrier", self._barrier_signature)

    def close(self) -> None:
        if self._error is None:
            self._error = CollectiveError("close", "the collectives are closed")
        self._views.clear()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            del self._futex

    def _usable(self, operation: str) -> Segment | None:
        """The segment, or None in a gang of one. Raises when an earlier collective failed or after `close`."""
        if self._error is not None:
            error = self._error
            raise CollectiveError(operation, f"not possible since {error}", error.missing_ranks) from error
        return self._segment

    def _make_views(self, operation: str, x: Tensor) -> _Views:
        assert self._segment is not None
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        views = _Views(self._segment, operation, x.shape, x.dtype)
        self._views[operation, x.shape, x.dtype] = views
        return views

    # Meeting

    def _meet(self, operation: str, signature: int) -> None:
        """Return once every rank has reached its meeting of the same number."""
        try:
            self._arrive_and_wait(operation, signature)
        except CollectiveError:
            raise
        except BaseException as error:  # An interrupted rank is out of step: neither it nor its peers may go on.
            self._break(CollectiveError(operation, f"interrupted by {error!r}"))
            raise

    def _arrive_and_wait(self, operation: str, signature: int) -> None:
        segment = self._segment
        assert segment is not None
        arrivals, generation = segment.arrivals, segment.generation
        sequence = self._sequence + 1
        self._sequence = sequence
        arrival = sequence << 16 | signature
        if not _TOTAL_STORE_ORDER:
            self._fence()
        arrivals[self.rank] = arrival
        self._fence()
        if self._publish_if_all_arrived(sequence, operation, segment):
            return
        for _ in range(self._spins):
            if generation[0] >= sequence:
                break
            _yield_core()
        else:
            self._sleep_until(sequence, operation, segment)
        if not _TOTAL_STORE_ORDER:
            self._fence()

    def _publish_if_all_arrived(self, sequence: int, operation: str, segment: Segment) -> bool:
        """Whether every rank is there; then the sleeping ones are woken."""
        arrivals = segment.arrivals
        mine = arrivals[self.rank]
        for peer in self._peers:
            other = arrivals[peer]
            if other != mine and other >> 16 <= sequence:
                if other >> 16 == sequence:
                    self._fail(operation, f"rank {peer} called something else, or on another shape or dtype", [])
                return False
        if not _TOTAL_STORE_ORDER:
            self._fence()
        # Several ranks may find that all have arrived. None of them stores late: nobody stores a higher number before
        # each has arrived at the next meeting, and that it does after this store.
        segment.generation[0] = sequence
        self._fence()
        # The word may be one behind: of a rank that was about to sleep when the last meeting was complete.
        if segment.sleepers[0] >= sequence - 1:
            self._futex.wake_all()
        return True

    def _sleep_until(self, sequence: int, operation: str, segment: Segment) -> None:
        generation = segment.generation
        begin = time.monotonic()
        looked = begin
        segment.sleepers[0] = sequence
        self._fence()
        while generation[0] < sequence:
            self._futex.sleep_while(sequence - 1)
            if generation[0] >= sequence:
                return
            now = time.monotonic()
            if now - looked >= _SLEEP_S / 2:
                looked = now
                self._look_at_peers(sequence, operation, segment, now - begin)

    def _look_at_peers(self, sequence: int, operation: str, segment: Segment, waited_s: float) -> None:
        """Raise if a peer will never arrive, or none may be waited for any longer."""
        dead = segment.dead_ranks()
        reasons = [f"rank {rank} (pid {segment.pids[rank]}) died" for rank in dead]
        gone = set(dead)
        failed = []
        late = [rank for rank in self._peers if segment.arrivals[rank] >> 16 < sequence]
        for rank in sorted(self._peers):
            if rank in gone:
                continue
            if segment.statuses[rank] == Status.FAILED:
                failed.append(rank)
            elif segment.statuses[rank] == Status.LEFT and rank in late:
                gone.add(rank)
                reasons.append(f"rank {rank} (pid {segment.pids[rank]}) left")
        if segment.generation[0] >= sequence:
            return
        if not reasons and not failed and self._publish_if_all_arrived(sequence, operation, segment):
            return  # The last rank to arrive was stopped before it could say so.
        if failed and not gone:
            for rank in failed:
                gone |= {peer for peer in range(self.world_size) if segment.blames[rank] >> peer & 1}
            found = f", missing ranks {sorted(gone)}" if gone else ""
            reasons.append(f"a collective failed on ranks {failed}{found}")
        if reasons:
            self._fail(operation, "; ".join(reasons), sorted(gone))
        if waited_s >= self._timeout_s:
            late.sort()
            names = ", ".join(f"{rank} (pid {segment.pids[rank]})" for rank in late)
            self._fail(operation, f"ranks {names} did not arrive within {self._timeout_s:g} s", late)

    def _fail(self, operation: str, reason: str, missing: list[int]) -> NoReturn:
        error = CollectiveError(operation, reason, missing)
        self._break(error)
        raise error

    def _break(self, error: CollectiveError) -> None:
        """No later call succeeds, and the peers are told."""
        self._error = error
        if self._segment is not None:
            self._segment.blames[self.rank] = sum(1 << rank for rank in error.missing_ranks)
            self._fence()
            self._segment.statuses[self.rank] = Status.FAILED

    def _fence(self) -> None:
        """Order all earlier loads and stores before all later ones (see the note at the top)."""
        with self._fence_lock:
            pass
        if not _TOTAL_STORE_ORDER:
            with self._fence_lock:
                pass


def _sum_ranks(inputs: np.ndarray, output: np.ndarray | None = None) -> np.ndarray:
    """Sum of [world_size, n] over the ranks, in rank order and in the inputs' dtype."""
    result: np.ndarray = np.add.reduce(inputs, axis=0, dtype=inputs.dtype, out=output)
    return result


def _yield_core() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signature(operation: str, shape: torch.Size, dtype: torch.dtype) -> int:
    """16 bits by which ranks notice that they do different things."""
    return zlib.crc32(f"{operation} {tuple(shape)} {dtype}".encode()) & 0xFFFF
