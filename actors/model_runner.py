"""ModelRunner: turns one step's message into graph calls on one rank.

`execute` names the stages in order: evict, encode, forward (which gathers), sample. The connector's load and save will
stand around encode. Time comes from the message's clock; nothing else may decide anything on a single rank.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from blake3 import blake3

from actors.messages import (
    EncoderCacheOccupancy,
    MMItem,
    NewRequest,
    RankOutput,
    SchedulerOutput,
    TokenLogprobs,
    WarmUp,
)
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan
from actors.rank_request import RankRequest
from actors.step_inputs import DecodeCall, PrefillCall, StepInputs
from neuron.collectives import Collectives
from neuron.encoder_cache_blocks import EncoderCacheBlocks
from neuron.kv_blocks import KVBlocks
from neuron.models import family_of
from neuron.models.interface import MRopeItem, VisionBlock
from neuron.sampler import SamplingRow, sample
from neuron.vision_packing import PackedImage, pack
from telemetry import metrics
from telemetry.prometheus import Recorder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRunner:
    """One rank's model, KV blocks and encoder cache shard, and what it knows of the running requests."""

    def __init__(self, plan: EnginePlan, collectives: Collectives, pixels: PixelMailbox, recorder: Recorder) -> None:
        config = plan.config
        self._plan = plan
        self._collectives = collectives
        self._pixels = pixels
        self._recorder = recorder
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._family = family_of(config.model.folder)
        self._model_config = self._family.load_config(config.model.folder)
        self._model_config.validate(self._world_size)
        dtype = _DTYPES[plan.dtype]
        self._model = self._family.load_model(config.model.folder, collectives, dtype, plan.device)
        self._kv = KVBlocks(
            num_layers=self._model_config.num_layers,
            num_blocks=config.kv_cache.num_blocks,
            block_size=config.kv_cache.block_size,
            num_kv_heads=self._model_config.num_local_kv_heads(self._world_size),
            head_dim=self._model_config.head_dim,
            dtype=dtype,
            device=plan.device,
        )
        cache = config.encoder_cache
        self.encoder_cache = EncoderCacheBlocks(cache.num_blocks, cache.block_size, cache.min_hold_time_ms)
        self._embeddings = torch.zeros(
            cache.num_blocks * cache.block_size,
            self._model_config.fat_dim // self._world_size,
            dtype=dtype,
            device=plan.device,
        )
        self._scratch_row = (cache.num_blocks - 1) * cache.block_size
        self._inputs = StepInputs(plan, self.encoder_cache, self._embeddings)
        self._requests: dict[str, RankRequest] = {}
        self._counters: dict[str, int] = {}
        self._timings: dict[str, float] = {}
        self._emit_metrics({})

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._model.nbytes

    @torch.no_grad()
    def execute(self, output: SchedulerOutput) -> RankOutput:
        """Run one step. The order of the stages is the contract with the scheduler's accounting."""
        self._counters, self._timings = {}, {}
        self._update_requests(output)
        self._evict(output)
        self._execute_mm_encoder(output)
        sampled = self._forward(output)
        self._emit_metrics(self._counters)
        return RankOutput(
            step_id=output.step_id,
            rank=self._rank,
            sampled=sampled,
            occupancy=self._occupancy(),
            counters=self._counters,
            timings=self._timings,
            digest=self._digest() if self._plan.config.debug.rank_digest else None,
        )

    @torch.no_grad()
    def warm_up(self, command: WarmUp) -> RankOutput:
        """Run the graph of one bucket with padding alone."""
        begin = time.monotonic()
        graph, _, size = command.bucket.partition("/")
        if graph == "encode":
            self._encode_block(int(size), ())
        else:
            rows, context = map(int, size.split("x"))
            self._run(self._inputs.padding(graph, rows, context))
        return RankOutput(step_id=command.step_id, rank=self._rank, timings={command.bucket: time.monotonic() - begin})

    # Stages

    def _update_requests(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:
            self._requests.pop(request_id, None)
        for new in output.new_requests:
            self._requests[new.request_id] = self._admit(new)
        for change in output.running_requests:
            self._requests[change.request_id].update(change)

    def _admit(self, new: NewRequest) -> RankRequest:
        images = [MRopeItem(item.offset, item.length, item.grid) for item in new.mm_items]
        rope, delta = self._family.mrope_positions(self._model_config, len(new.token_ids), images)
        return RankRequest.from_message(new, rope, delta)

    def _evict(self, output: SchedulerOutput) -> None:
        self.encoder_cache.advance(output.clock)
        freed = sum(self.encoder_cache.free(mm_hash, output.clock) for mm_hash in output.free_encoder_mm_hashes)
        self._count(metrics.DEVICE_ENCODER_CACHE_EVICTIONS, freed)

    def _execute_mm_encoder(self, output: SchedulerOutput) -> None:
        """Encode the scheduled images that are absent, each rank its blocks, and store every rank's columns."""
        items = [
            self._requests[request_id].mm_items[index]
            for request_id, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        ]
        if not items:
            return
        absent = [item for item in items if not self.encoder_cache.contains(item.mm_hash)]
        self._count(metrics.DEVICE_ENCODER_CACHE_QUERIES, len(items))
        self._count(metrics.DEVICE_ENCODER_CACHE_MISSES, len(absent))
        for item in absent:
            self.encoder_cache.allocate(item.mm_hash, item.num_embeddings)
        by_hash = {item.mm_hash: item for item in items}
        patches = [(item.mm_hash, item.grid[0] * item.grid[1] * item.grid[2]) for item in items]
        absent_hashes = {item.mm_hash for item in absent}
        with self._timed("encode"):
            # Packed over all items, as the scheduler's side packed them to send the pixels.
            for vision_round in pack(
                patches, self._plan.vision_patches, self._world_size, self._model_config.merge_area
            ):
                rows = torch.full((self._world_size * vision_round.num_rows,), self._scratch_row, dtype=torch.int64)
                for rank, block in enumerate(vision_round.blocks):
                    for image in block:
                        if image.mm_hash in absent_hashes:
                            first = rank * vision_round.num_rows + image.row_offset
                            rows[first : first + image.num_rows] = torch.tensor(self.encoder_cache.rows(image.mm_hash))
                self._encode_block(vision_round.num_patches, vision_round.blocks[self._rank], by_hash, rows)
        for item in absent:
            self.encoder_cache.mark_written(item.mm_hash, output.clock)

    def _encode_block(
        self,
        num_patches: int,
        block: Sequence[PackedImage],
        items: dict[str, MMItem] | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Encode this rank's block of a round, or zeros if it has none, and exchange the round's embeddings.

        Without `rows` (the warm-up) the encoder runs on padding and everything goes to scratch.
        """
        num_rows = num_patches // self._model_config.merge_area
        if block or rows is None:
            images = [
                (
                    self._pixels.take(image.mm_hash, self._plan.config.parallel.collective_timeout_s),
                    items[image.mm_hash].grid,
                )
                for image in block
                if items is not None
            ]
            prepared = self._family.prepare_vision_block(self._model_config, images, num_patches)
            embeddings = self._model.encode(VisionBlock(*map(torch.from_numpy, prepared)))
        else:
            embeddings = torch.zeros(num_rows, self._model_config.fat_dim, dtype=self._embeddings.dtype)
        if rows is None:
            rows = torch.full((self._world_size * num_rows,), self._scratch_row, dtype=torch.int64)
        self._model.write_embeddings(embeddings, self._embeddings, rows)

    def _forward(self, output: SchedulerOutput) -> dict[str, TokenLogprobs]:
        """Run the step's graphs and sample where a request's last known token was computed."""
        chunks = [(self._requests[request_id], count) for request_id, count in output.num_scheduled_tokens.items()]
        if not chunks:
            return {}
        sampled: dict[str, TokenLogprobs] = {}
        if output.phase == "decode":
            decode = self._inputs.decode([request for request, _ in chunks])
            sampled.update(self._sample([request for request, _ in chunks], self._run(decode)))
        else:
            for group in self._inputs.split(chunks):
                prefill = self._inputs.prefill(group)
                sampled.update(self._sample(prefill.sampled, self._run(prefill)))
        for request, count in chunks:
            request.num_computed_tokens += count
        return sampled

    def _run(self, call: PrefillCall | DecodeCall) -> torch.Tensor:
        """Logits [rows, vocab_size] float32."""
        with self._timed("forward"):
            if isinstance(call, DecodeCall):
                return self._model.decode(self._kv, call.inputs)
            return self._model.prefill(self._kv, call.inputs, call.images)

    def _sample(self, requests: Sequence[RankRequest], logits: torch.Tensor) -> dict[str, TokenLogprobs]:
        """Rank 0 draws; the scheduler's next message tells the others."""
        if self._rank != 0 or not requests:
            return {}
        with self._timed("sample"):
            rows = [
                SamplingRow(
                    params=request.sampling,
                    position=len(request.token_ids),
                    prompt_token_ids=np.asarray(request.token_ids[: request.num_prompt_tokens], np.int64),
                    output_token_ids=np.asarray(request.token_ids[request.num_prompt_tokens :], np.int64),
                )
                for request in requests
            ]
            tokens = sample(logits[: len(rows)], rows)
        return {
            request.request_id: TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=token.top)
            for request, token in zip(requests, tokens, strict=True)
        }

    # Bookkeeping

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._timings[stage] = self._timings.get(stage, 0.0) + time.monotonic() - begin

    def _count(self, metric: metrics.Metric, amount: int) -> None:
        self._counters[metric.name] = self._counters.get(metric.name, 0) + amount

    def _occupancy(self) -> EncoderCacheOccupancy:
        cache = self.encoder_cache
        return EncoderCacheOccupancy(
            active_blocks=cache.num_active_blocks,
            free_blocks=cache.num_free_blocks,
            held_blocks=cache.num_held_blocks,
            active_real_tokens=cache.num_active_real_tokens,
        )

    def _emit_metrics(self, counters: dict[str, int]) -> None:
        """Once per step, after evictions and allocations: gauges from every rank, counters from rank 0."""
        occupancy = self._occupancy()
        for gauge, value in (
            (metrics.DEVICE_ENCODER_CACHE_ACTIVE_BLOCKS, occupancy.active_blocks),
            (metrics.DEVICE_ENCODER_CACHE_FREE_BLOCKS, occupancy.free_blocks),
            (metrics.DEVICE_ENCODER_CACHE_HELD_BLOCKS, occupancy.held_blocks),
            (metrics.DEVICE_ENCODER_CACHE_ACTIVE_REAL_TOKENS, occupancy.active_real_tokens),
        ):
            self._recorder.set(gauge, value)
        if self._rank == 0:
            for counter in (
                metrics.DEVICE_ENCODER_CACHE_QUERIES,
                metrics.DEVICE_ENCODER_CACHE_MISSES,
                metrics.DEVICE_ENCODER_CACHE_EVICTIONS,
            ):
                self._recorder.add(counter, counters.get(counter.name, 0))

    def _digest(self) -> str:
        """Of everything that must be equal on all ranks after a step."""
        hasher = blake3(self.encoder_cache.digest().encode())
        for request_id, request in sorted(self._requests.items()):
            known = (request_id, request.token_ids, request.num_computed_tokens, request.block_ids)
            hasher.update(repr(known).encode())
        return hasher.hexdigest(length=8)
