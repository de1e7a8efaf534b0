"""RankActor: one rank of the gang as a Ray actor. A thin shell over ModelRunner; imports no torch before `load`."""

import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from actors.compiled_graphs import graphs_digest
from actors.messages import Command, RankOutput, WarmUp
from actors.neuron_cores import CORES_VARIABLE, LNC_VARIABLE, set_runtime_environment
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan
from actors.step_channel import serve_socket

if TYPE_CHECKING:
    from actors.model_runner import ModelRunner


class RankActor:
    """One SPMD rank. Wrapped by `ray.remote` in RankGroup; its methods run on the threads of a threaded actor.

    All that computes runs on one thread: torch keeps the number of its threads per calling thread, and each that
    computes gets OpenMP threads of its own (two sets of them: 3.7 ms a token instead of 2.3).
    """

    def __init__(self, rank: int, plan: EnginePlan, engine: str, ray_tags: dict[str, str]) -> None:
        """`rank` may still change, by `take_core`. `ray_tags`: what this rank's metrics are tagged with in Ray."""
        self.rank = rank
        self.plan = plan
        self.engine = engine
        self.ray_tags = ray_tags
        self.pixels = PixelMailbox()
        self.runner: ModelRunner | None = None
        self._computing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def describe(self) -> dict[str, Any]:
        """Where this rank runs: process id, Ray node id, and the variables that name its NeuronCores."""
        import ray

        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "cores": os.environ.get(CORES_VARIABLE),
            "lnc": os.environ.get(LNC_VARIABLE),
        }

    def take_core(self, rank: int, variables: dict[str, str]) -> None:
        """On NeuronCores, before `load`: the rank that this actor's core makes it, and the runtime's variables."""
        set_runtime_environment(variables)
        self.rank = rank

    def graphs_digest(self) -> str:
        """Of what this rank's graphs are compiled from; after `take_core`, which sets variables that belong to it."""
        return graphs_digest(self.plan)

    def load(self, collectives: str, rendezvous: str) -> dict[str, Any]:
        """Join the collectives and read this rank's slice of the weights. Returns seconds and bytes.

        Where peers did not join: `missing_ranks` and `error` instead.
        """
        return self._computing.submit(self._load, collectives, rendezvous).result()

    def _load(self, collectives: str, rendezvous: str) -> dict[str, Any]:
        import torch

        from actors.faults import check_fault
        from actors.model_runner import ModelRunner
        from neuron.collectives import CollectiveError, create_collectives
        from telemetry import logs, spans
        from telemetry.recorder import create_recorder

        begin = time.monotonic()
        config, parallel = self.plan.config, self.plan.config.parallel
        logs.configure()
        if self.rank == 0:
            spans.configure(f"rank {self.rank}", config.telemetry.spans_file)
        torch.set_num_threads(parallel.threads_per_rank)
        check_fault(config.debug.fault_dir, "load", self.rank)
        try:
            joined = create_collectives(
                collectives, self.rank, parallel.world_size, rendezvous, parallel.collective_timeout_s
            )
        except CollectiveError as error:
            return {"error": str(error), "missing_ranks": error.missing_ranks}
        recorder = create_recorder(config.model, self.engine, self.ray_tags | {"rank": str(self.rank)})
        self.runner = ModelRunner(self.plan, joined, self.pixels, recorder)
        return {"seconds": time.monotonic() - begin, "bytes": float(self.runner.weight_bytes)}

    def put_pixels(self, mm_hashes: list[str], *pixels: Any) -> None:
        """Take the pixels of the images that this rank encodes; Ray has resolved the references to arrays.

        None stands for pixels that were lost.
        """
        for mm_hash, array in zip(mm_hashes, pixels, strict=True):
            self.pixels.put(mm_hash, array)

    def serve(self, address: tuple[str, bytes]) -> None:
        """The step loop over a local socket: returns when the scheduler's end closes."""
        self._computing.submit(serve_socket, address, self.rank, self._handle).result()

    def handle(self, command: bytes) -> bytes:
        """One command, one answer; what a step raises travels back as its traceback."""
        return self._computing.submit(self._handle, command).result()

    def _handle(self, command: bytes) -> bytes:
        assert self.runner is not None, "handle before load"
        message = self._decoder.decode(command)
        try:
            if isinstance(message, WarmUp):
                output = self.runner.warm_up(message)
            else:
                output = self.runner.execute(message)
        except Exception as error:
            missing = missing_ranks(error)
            output = RankOutput(
                step_id=message.step_id, rank=self.rank, error=traceback.format_exc(), missing_ranks=missing
            )
        return self._encoder.encode(output)


def missing_ranks(error: BaseException) -> tuple[int, ...]:
    """The ranks that a failed collective waited for in vain; none where the error is another, or this rank's own."""
    chain: BaseException | None = error
    while chain is not None:
        found = getattr(chain, "missing_ranks", None)
        if found is not None:
            return tuple(found)
        chain = chain.__cause__ or chain.__context__
    return ()
