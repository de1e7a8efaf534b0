"""RankGroup: starts the gang, sends it steps, notices when a rank is gone, and starts it anew.

It alone knows how a step reaches the ranks (see `step_channel`). Stages of a start: placed, loaded, warmed.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.environment import COMPUTES
from actors.messages import PixelFile, RankOutput, SchedulerOutput, WarmUp
from actors.neuron_cores import (
    check_gang,
    core_order,
    parse_cores,
    read_instance,
    root_address,
    runtime_environment,
)
from actors.pixel_memory import PixelMemory
from actors.plan import EnginePlan
from actors.rank_actor import RankActor
from actors.rank_processes import end_processes, remove_segments
from actors.step_channel import ActorCallChannel, RankFailure, SocketChannel, StepChannel, first_line
from configs.engine import ConfigError
from neuron.vision_packing import pack
from telemetry import probe, spans
from telemetry.prometheus import METRICS_VARIABLE, forget_process

logger = logging.getLogger("trn_vision_serve")

_HEAD_START_S = 2.0
"""Enough for rank 0 to trace a graph and take the compile cache's lock on it."""

_GRACE_S = 2.0
"""How much longer than its ranks' collectives a step may take: their errors say who is missing."""

Report = Callable[[str, int, int, float], None]
"""(stage, done, total, seconds since the stage began)"""


def _environment() -> dict[str, str]:
    """Variables that must be set before a rank imports torch, beside the metric folder."""
    inherited = {name: os.environ[name] for name in (METRICS_VARIABLE,) if name in os.environ}
    return COMPUTES | inherited | probe.environment() | spans.environment()


@dataclass
class StartFigures:
    """What the latest start of a gang took."""

    load_seconds: float = 0.0
    load_bytes: float = 0.0
    """Weights, summed over ranks."""
    compile_seconds: dict[str, float] = field(default_factory=dict)
    """Bucket -> seconds of its graph's first execution on rank 0."""


class RankGroup:
    """The sixteen (world_size) rank actors of one engine, in lockstep.

    `placement_group` has a bundle for the scheduler's replica and then one per rank; None places ranks anywhere.
    """

    def __init__(
        self,
        plan: EnginePlan,
        report: Report,
        engine: str = "0",
        placement_group: PlacementGroup | None = None,
        ray_tags: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.world_size = plan.config.parallel.world_size
        self._report = report
        self._engine = engine
        self._placement_group = placement_group
        self._ray_tags = dict(ray_tags or {})
        self.start_figures = StartFigures()
        self._actors: list[Any] = []
        self._pids: list[int] = []
        """By rank."""
        self._local_pids: list[int] = []
        """Of the ranks on this node."""
        self._rendezvous_name = ""
        self._channel: StepChannel | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankOutput)

    # Start and stop

    def start(self) -> None:
        """Place, load and warm the gang. Raises RankFailure, ConfigError for NeuronCores that do not fit, or what a
        rank's load raised."""
        self.place_and_load()
        self._warm_up()

    def place_and_load(self) -> None:
        """A start without its warm-up."""
        self._load(self._place())

    def restart(self) -> None:
        """Replace every rank: a gang in lockstep cannot lose one alone. Raises RankFailure, whatever went wrong."""
        self.shutdown()
        try:
            self.start()
        except RankFailure:
            raise
        except Exception as error:  # the configuration is one that started before
            raise RankFailure(-1, f"failed to start: {first_line(error)}", "raised", str(error)) from error

    def shutdown(self) -> None:
        """End every rank, also one that is stopped; its gauges go with it."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for actor in self._actors:
            ray.kill(actor)
        end_processes(self._local_pids)
        for pid in self._local_pids:
            forget_process(pid)
        remove_segments(self._rendezvous_name)
        self._actors, self._pids, self._local_pids, self._rendezvous_name = [], [], [], ""

    def _place(self) -> list[str]:
        begin = time.monotonic()
        remote = ray.remote(RankActor)
        resources = {name: amount for name, amount in self.plan.rank_bundle.items() if name != "CPU"}
        for rank in range(self.world_size):
            options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8, "runtime_env": {"env_vars": _environment()}}
            options["resources"] = resources
            if self._placement_group is not None:
                options["num_cpus"] = self.plan.cpus_per_rank
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    self._placement_group, placement_group_bundle_index=rank + 1
                )
            self._actors.append(remote.options(**options).remote(rank, self.plan, self._engine, self._ray_tags))
        places = self._gather("placed", [actor.describe.remote() for actor in self._actors], begin)
        self._pids = [place["pid"] for place in places]
        own_node = ray.get_runtime_context().get_node_id()
        self._local_pids = [place["pid"] for place in places if place["node"] == own_node]
        if self.plan.device == "neuron":
            self._take_cores(places)
        return [place["node"] for place in places]

    def _take_cores(self, places: list[dict[str, Any]]) -> None:
        """Check the NeuronCores that Ray gave and number the ranks in their order: Ray may give an actor any core."""
        own_node = ray.get_runtime_context().get_node_id()
        if {place["node"] for place in places} != {own_node}:
            raise ConfigError(
                "parallel.device = 'neuron': ranks were placed on other nodes than their scheduler's; the NeuronCores "
                "of a gang are on one instance: expected placement_group_strategy: STRICT_PACK"
            )
        cores = [parse_cores(place["cores"]) for place in places]
        check_gang(cores, read_instance(), self.config.parallel.logical_neuroncore_config, places[0]["lnc"])
        order = core_order(cores)
        self._actors = [self._actors[index] for index in order]
        self._pids = [self._pids[index] for index in order]
        root = root_address(ray.util.get_node_ip_address(), cores[order[0]])
        ray.get(
            [
                actor.take_core.remote(rank, runtime_environment(rank, self.world_size, root, cores[index]))
                for rank, (actor, index) in enumerate(zip(self._actors, order, strict=True))
            ]
        )

    def _load(self, nodes: list[str]) -> None:
        begin = time.monotonic()
        local = set(nodes) == {ray.get_runtime_context().get_node_id()}
        parallel = self.config.parallel
        collectives = parallel.collectives
        if collectives == "auto":
            collectives = "xla" if self.plan.device == "neuron" else "shared_memory" if local else "gloo"
        rendezvous = self._rendezvous_name = self._rendezvous(collectives)
        loaded = self._gather("loaded", [actor.load.remote(collectives, rendezvous) for actor in self._actors], begin)
        self.start_figures.load_seconds = time.monotonic() - begin
        self.start_figures.load_bytes = sum(rank["bytes"] for rank in loaded)
        if parallel.step_channel == "socket" or (parallel.step_channel == "auto" and local):
            channel = self._channel = SocketChannel(self.world_size, parallel.collective_timeout_s)
            for actor in self._actors:
                actor.serve.remote(channel.address)
            channel.accept(parallel.collective_timeout_s)
        else:
            self._channel = ActorCallChannel(self._actors)

    def _rendezvous(self, collectives: str) -> str:
        """Where the ranks meet: a new name for shared memory, a host and a free port for torch.distributed."""
        if collectives == "shared_memory":
            return f"tvs-{uuid.uuid4().hex[:12]}"
        import socket

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def _gather(self, stage: str, answers: list[Any], begin: float) -> list[Any]:
        """Wait for one answer of every rank, reporting each. Raises RankFailure, or what a rank raised."""
        timeout_s = self.config.parallel.start_timeout_s
        pending = list(answers)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, begin + timeout_s - time.monotonic()))
            if not done:
                rank = answers.index(pending[0])
                raise RankFailure(rank, f"was not {stage} within {timeout_s:g} s (parallel.start_timeout_s)", "hung")
            rank = answers.index(done[0])
            try:
                answer = ray.get(done[0])
            except ray.exceptions.RayActorError as error:
                raise RankFailure(
                    rank, f"died before it was {stage}: {first_line(error)}", "died", str(error)
                ) from error
            if isinstance(answer, dict) and "error" in answer:
                missing = answer["missing_ranks"]
                raise RankFailure(min(missing, default=rank), f"was not {stage}: {answer['error']}", "hung")
            self._report(stage, len(answers) - len(pending), len(answers), time.monotonic() - begin)
        return ray.get(answers)

    def _warm_up(self) -> None:
        begin = time.monotonic()
        buckets = self.plan.bucket_names()
        for index, bucket in enumerate(buckets, start=1):
            seconds = self.warm_up_bucket(WarmUp(step_id=-index, bucket=bucket, last=index == len(buckets)))
            self.start_figures.compile_seconds[bucket] = seconds
            if self.plan.kind.compiles:
                logger.info("start: %s warmed in %.1f s, %d of %d", bucket, seconds, index, len(buckets))
            self._report("warmed", index, len(buckets), time.monotonic() - begin)

    def graphs_digest(self) -> str:
        """What rank 0 compiles its graphs from, see `actors.compiled_graphs`."""
        return str(ray.get(self._actors[0].graphs_digest.remote()))

    def warm_up_bucket(self, command: WarmUp) -> float:
        """Run one bucket on every rank; returns rank 0's seconds."""
        timeout_s = self.config.parallel.collective_timeout_s
        if self.plan.kind.compiles:
            timeout_s = self.config.parallel.compile_timeout_s
            # A graph holds collectives, so that rank 0 cannot run it alone: it only begins before the others do.
            command = msgspec.structs.replace(command, head_start_s=_HEAD_START_S)
        return self._exchange(command, timeout_s)[0].timings[command.bucket]

    # Steps

    def step(
        self,
        output: SchedulerOutput,
        pixels: Mapping[str, Any],
        items: list[tuple[str, int]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> RankOutput:
        """Run one step on every rank and return rank 0's answer. Raises RankFailure.

        `items`: (mm_hash, patches) of the images to encode, in the message's order; `pixels`: Ray's references, or
        PixelMemory, by mm_hash, without those that lead to nothing. `meanwhile` is called once the ranks have the step.
        """
        if items:
            files = self._send_pixels(pixels, items)
            output = msgspec.structs.replace(output, pixel_files=files)
        answers = self._exchange(output, self.config.parallel.collective_timeout_s, meanwhile)
        if self.config.debug.rank_digest:
            for answer in answers:
                if answer.digest != answers[0].digest:
                    reason = f"differs from rank 0 after step {output.step_id}: its bookkeeping"
                    raise RankFailure(answer.rank, reason, "differs")
        return answers[0]

    def _send_pixels(self, pixels: Mapping[str, Any], items: list[tuple[str, int]]) -> dict[str, PixelFile]:
        """Each image goes to the one rank that encodes it; of pixels in this node's memory the step itself tells."""
        held = {mm_hash: each for mm_hash, each in pixels.items() if isinstance(each, PixelMemory)}
        if isinstance(self._channel, SocketChannel):
            files = {mm_hash: memory.file for mm_hash, memory in held.items()}
        else:
            files, pixels = {}, {**pixels, **{mm_hash: memory.array() for mm_hash, memory in held.items()}}
        wanted: dict[int, list[str]] = {}
        for vision_round in pack(items, self.plan.vision_patches, self.world_size, self.plan.merge_area):
            for rank, block in enumerate(vision_round.blocks):
                wanted.setdefault(rank, []).extend(each.mm_hash for each in block if each.mm_hash not in files)
        for rank, mm_hashes in wanted.items():
            if mm_hashes:
                self._actors[rank].put_pixels.remote(mm_hashes, *(pixels.get(mm_hash) for mm_hash in mm_hashes))
        return files

    def _exchange(
        self, command: SchedulerOutput | WarmUp, timeout_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> list[RankOutput]:
        """The ranks' answers, by rank. Raises RankFailure that names the rank at whose door it lies."""
        channel = self._channel
        assert channel is not None, "step before start"
        outputs: dict[int, RankOutput] = {}
        failure: RankFailure | None = None
        channel.send(self._encoder.encode(command))
        meanwhile()
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while channel.waited_for:
            answer = channel.receive(deadline - time.monotonic())
            if answer is None:
                waited_for = channel.waited_for
                reason = f"did not answer within {timeout_s:g} s (waiting for ranks {waited_for})"
                raise failure or RankFailure(waited_for[0], reason, "hung")
            output = self._decoder.decode(answer)
            if output.error is None:
                outputs[output.rank] = output
            elif not output.missing_ranks:
                reason = f"raised in step {command.step_id}: {_last_line(output.error)}"
                raise RankFailure(output.rank, reason, "raised", output.error)
            elif failure is None:
                # The missing rank itself may be about to say what became of it, or its socket to close.
                reason = f"was missing in step {command.step_id}: on rank {output.rank}, {_last_line(output.error)}"
                failure = RankFailure(output.missing_ranks[0], reason, "hung", output.error)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failure is not None:
            raise failure
        return [outputs[rank] for rank in range(self.world_size)]

    def check(self) -> None:
        """Between steps: raises RankFailure when a rank has gone."""
        if self._channel is not None:
            self._channel.check()


def _last_line(text: str) -> str:
    """Of a traceback: the error itself."""
    return first_line("\n".join(reversed(text.splitlines())))
