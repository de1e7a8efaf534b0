"""ModelRunner: turns one step's message into graph calls on one rank.

`execute` names the stages in order: evict, encode, forward (which gathers), sample. The connector's load and save will
stand around encode. Time comes from the message's clock; nothing else may decide anything on a single rank.
Weights and caches live on the rank's device; inputs are made on the host and moved there for the graph that takes them.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from actors.compiled_graphs import check_compiled
from actors.environment import give_back_memory
from actors.faults import check_fault
from actors.messages import (
    EncoderCacheOccupancy,
    MMItem,
    NewRequest,
    PixelFile,
    RankOutput,
    SchedulerOutput,
    TokenLogprobs,
    WarmUp,
)
from actors.pixel_memory import PixelMemory
from actors.pixels import PixelMailbox
from actors.plan import EnginePlan
from actors.rank_metrics import RankMetrics
from actors.rank_request import RankRequest
from actors.stages import Stages
from actors.step_inputs import Chunk, DecodeCall, PrefillCall, StepInputs
from actors.token_sampler import TokenSampler
from neuron.collectives import Collectives
from neuron.device import create_device
from neuron.device.graphs import Graphs, NewShapeError
from neuron.encoder_cache_blocks import EncoderCacheBlocks
from neuron.kernels import choose_kernels
from neuron.kv_blocks import KVBlocks
from neuron.models import family_of
from neuron.models.interface import ImageInputs, MRopeItem, VisionBlock
from neuron.sampler import SamplingRow
from neuron.untouched_memory import zeros
from neuron.vision_packing import Round, pack
from telemetry import metrics
from telemetry.logs import LOGGER_NAME
from telemetry.probe import mm_cache_probe
from telemetry.recorder import Recorder

logger = logging.getLogger(LOGGER_NAME)

Grid = tuple[int, int, int]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Encoding:
    """One execution of the encoder graph: a round, as this rank sees it."""

    bucket_name: str
    num_patches: int
    """Of this rank's images, without padding."""
    inputs: VisionBlock | None
    """None: this rank has no image in the round, and need not run the encoder for that."""
    rows: torch.Tensor
    """[world_size * num_rows] cache rows, scratch for padding."""


class ModelRunner:
    """One rank's model, KV blocks and encoder cache shard, and what it knows of the running requests."""

    def __init__(self, plan: EnginePlan, collectives: Collectives, pixels: PixelMailbox, recorder: Recorder) -> None:
        config = plan.config
        self._plan = plan
        self._collectives = collectives
        self._pixels = pixels
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._family = family_of(config.model.folder)
        self._model_config = self._family.load_config(config.model.folder)
        self._model_config.validate(self._world_size)
        dtype = _DTYPES[plan.dtype]
        if config.compiler.require_compiled:
            check_compiled(plan)
        self.device = create_device(plan.device, config.compiler.cache_dir)
        self._graphs = Graphs(self.device, self._met_new_shape)
        kernels = choose_kernels(
            plan.kind.kernels, plan.kind.kernels_for_high, plan.dtype, config.model.matmul_precision
        )
        self._model = self._family.load_model(
            config.model.folder, collectives, kernels, dtype, self.device.torch_device
        )
        self._kv = KVBlocks(
            num_layers=self._model_config.num_layers,
            num_blocks=config.kv_cache.planned_num_blocks,
            block_size=config.kv_cache.block_size,
            num_kv_heads=self._model_config.num_local_kv_heads(self._world_size),
            head_dim=self._model_config.head_dim,
            dtype=dtype,
            device=self.device.torch_device,
        )
        cache = config.encoder_cache
        self.encoder_cache = EncoderCacheBlocks(cache.num_blocks, cache.block_size, cache.min_hold_time_ms)
        columns = self._model_config.fat_dim // self._world_size
        self._embeddings = zeros((cache.num_blocks * cache.block_size, columns), dtype, self.device.torch_device)
        self._scratch_row = (cache.num_blocks - 1) * cache.block_size
        self._inputs = StepInputs(plan, self.encoder_cache, self._embeddings)
        self._requests: dict[str, RankRequest] = {}
        self._metrics = RankMetrics(recorder, self._rank)
        self._metrics.expect(plan.bucket_names())
        self._sampler = TokenSampler(plan, self.device, self._graphs, self._metrics)
        self._warmed = False
        self._stages = Stages(reports=self._rank == 0)
        self._probe = mm_cache_probe("device") if self._rank == 0 else None
        self._metrics.emit(self._occupancy())

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._model.nbytes

    @torch.no_grad()
    def execute(self, output: SchedulerOutput) -> RankOutput:
        """Run one step. The order of the stages is the contract with the scheduler's accounting."""
        if self._warmed:
            self._graphs.end_warm_up()
        self._update_requests(output)
        requests = [self._requests[request_id] for request_id in output.num_scheduled_tokens]
        with self._stages.step(output, [request.trace for request in requests]):
            with self._stages("preprocess"):
                self._evict(output)
                self._execute_mm_encoder(output)
                calls = self._prepare(output)
            self._check_fault(output.phase)
            with self._stages("forward"):
                logits = [self._run(call) for call, _ in calls]
            with self._stages("sample"):
                sampled = self._sample([asked for _, asked in calls], logits)
        for request_id, count in output.num_scheduled_tokens.items():
            self._requests[request_id].num_computed_tokens += count
        occupancy, counters = self._occupancy(), self._metrics.counters
        self._metrics.emit(occupancy)
        return RankOutput(
            step_id=output.step_id,
            rank=self._rank,
            sampled=sampled,
            occupancy=occupancy,
            counters=counters,
            timings=self._stages.seconds,
            digest=self._digest() if self._plan.config.debug.rank_digest else None,
        )

    @torch.no_grad()
    def warm_up(self, command: WarmUp) -> RankOutput:
        """Run the graph of one bucket with padding alone."""
        if self._rank != 0:
            time.sleep(command.head_start_s)
        self._check_fault("warm_up")
        begin = time.monotonic()
        graph, _, size = command.bucket.partition("/")
        if graph == "encode":
            num_rows = int(size) // self._model_config.merge_area
            self._encode(_Encoding(command.bucket, 0, self._vision_block([], int(size)), self._scratch_rows(num_rows)))
        elif graph.startswith("sample"):
            if self._rank == 0:
                self._sampler.warm_up(command.bucket)
        else:
            rows, context = map(int, size.split("x"))
            self._graph(self._inputs.padding(graph, rows, context))
        self.device.wait()
        self._warmed = True
        if command.last:
            give_back_memory()
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
        self._metrics.count(metrics.DEVICE_ENCODER_CACHE_EVICTIONS, freed)

    def _execute_mm_encoder(self, output: SchedulerOutput) -> None:
        """Encode the scheduled images that are absent, each rank its blocks, and store every rank's columns."""
        scheduled = [
            (request_id, self._requests[request_id].mm_items[index])
            for request_id, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        ]
        if not scheduled:
            return
        absent = {item.mm_hash: item for _, item in scheduled if not self.encoder_cache.contains(item.mm_hash)}
        self._metrics.count(metrics.DEVICE_ENCODER_CACHE_QUERIES, len(scheduled))
        self._metrics.count(metrics.DEVICE_ENCODER_CACHE_MISSES, len(absent))
        if self._probe:
            for request_id, item in scheduled:
                self._probe(item.mm_hash not in absent, item.mm_hash, request_id)
        for item in absent.values():
            self.encoder_cache.allocate(item.mm_hash, item.num_embeddings)
        # Packed over all items, as the scheduler's side packed them to send the pixels.
        items = {item.mm_hash: item for _, item in scheduled}
        patches = [(item.mm_hash, math.prod(item.grid)) for item in items.values()]
        rounds = pack(patches, self._plan.vision_patches, self._world_size, self._model_config.merge_area)
        encodings = [self._encoding(each, items, absent, output.pixel_files) for each in rounds]
        if absent:
            self._check_fault("encode")
            with self._stages("vit_forward"):
                for encoding in encodings:
                    self._encode(encoding)
        for mm_hash in absent:
            self.encoder_cache.mark_written(mm_hash, output.clock)

    def _encoding(
        self, vision_round: Round, items: Mapping[str, MMItem], absent: Collection[str], files: Mapping[str, PixelFile]
    ) -> _Encoding:
        """A round's inputs on this rank: its own images, and the cache rows of every rank's absent ones."""
        rows = self._scratch_rows(vision_round.num_rows)
        for rank, block in enumerate(vision_round.blocks):
            for image in block:
                if image.mm_hash in absent:
                    first = rank * vision_round.num_rows + image.row_offset
                    rows[first : first + image.num_rows] = torch.tensor(self.encoder_cache.rows(image.mm_hash))
        mine = vision_round.blocks[self._rank]
        images = [(self._take_pixels(items[image.mm_hash], files), items[image.mm_hash].grid) for image in mine]
        encodes = bool(mine) or self._plan.kind.same_program
        inputs = self._vision_block(images, vision_round.num_patches) if encodes else None
        used = sum(image.num_patches for image in mine)
        return _Encoding(f"encode/{vision_round.num_patches}", used, inputs, rows)

    def _take_pixels(self, item: MMItem, files: Mapping[str, PixelFile]) -> np.ndarray:
        """An image's pixels. Lost ones are zeros, so that the ranks stay in step: nobody gets to read of them."""
        if (file := files.get(item.mm_hash)) is not None:
            return PixelMemory.open(file).array()
        pixels = self._pixels.take(item.mm_hash, self._plan.config.parallel.collective_timeout_s)
        return np.zeros((math.prod(item.grid), self._model_config.patch_dim), np.float32) if pixels is None else pixels

    def _vision_block(self, images: Sequence[tuple[np.ndarray, Grid]], num_patches: int) -> VisionBlock:
        prepared = self._family.prepare_vision_block(self._model_config, images, num_patches)
        return VisionBlock(*map(torch.from_numpy, prepared))

    def _scratch_rows(self, num_rows: int) -> torch.Tensor:
        """[world_size * num_rows]: an exchange of which nothing is kept."""
        return torch.full((self._world_size * num_rows,), self._scratch_row, dtype=torch.int64)

    def _encode(self, encoding: _Encoding) -> None:
        """Encode this rank's block, or take zeros if it has none, and exchange the round's embeddings."""
        if encoding.inputs is not None:
            self._graphs.run(
                encoding.bucket_name, self._encode_and_write, encoding.inputs, self._embeddings, encoding.rows
            )
        else:
            num_rows = len(encoding.rows) // self._world_size
            embeddings = torch.zeros(num_rows, self._model_config.fat_dim, dtype=self._embeddings.dtype)
            self._model.write_embeddings(embeddings, self._embeddings, encoding.rows)
        if encoding.num_patches:
            self._metrics.executed(encoding.bucket_name, None, encoding.num_patches)

    def _encode_and_write(
        self, block: VisionBlock[torch.Tensor], encoder_cache: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """The encode graph: the embeddings of every rank's block, in this rank's columns of its buffer."""
        self._model.write_embeddings(self._model.encode(block), encoder_cache, rows)

    def _prepare(self, output: SchedulerOutput) -> list[tuple[PrefillCall | DecodeCall, Sequence[RankRequest]]]:
        """The step's graph calls, each with the requests that rows of its logits belong to, in order."""
        chunks = [(self._requests[request_id], count) for request_id, count in output.num_scheduled_tokens.items()]
        if not chunks:
            return []
        if output.phase == "decode":
            requests = [request for request, _ in chunks]
            with self._stages("prepare_mm_inputs"):
                return [(self._inputs.decode(requests), requests)]
        calls: list[tuple[PrefillCall | DecodeCall, Sequence[RankRequest]]] = []
        for group in self._inputs.split(chunks):
            images = self._gather_mm_embeddings(group)
            with self._stages("prepare_mm_inputs"):
                prefill = self._inputs.prefill(group, images)
            calls.append((prefill, prefill.sampled))
        return calls

    def _gather_mm_embeddings(self, chunks: Sequence[Chunk]) -> ImageInputs | None:
        """The rows of the encoder cache that the chunks' image tokens take; the prefill graph reads them there."""
        with self._stages("gather_mm_embeddings"):
            return self._inputs.images(chunks)

    def _run(self, call: PrefillCall | DecodeCall) -> torch.Tensor:
        """Logits [rows, vocab_size] float32, on the device."""
        self._metrics.executed(
            call.bucket_name, call.num_tokens if isinstance(call, DecodeCall) else None, call.num_tokens
        )
        return self._graph(call)

    def _graph(self, call: PrefillCall | DecodeCall) -> torch.Tensor:
        if isinstance(call, DecodeCall):
            logits: torch.Tensor = self._graphs.run(call.bucket_name, self._model.decode, self._kv, call.inputs)
        else:
            logits = self._graphs.run(call.bucket_name, self._model.prefill, self._kv, call.inputs, call.images)
        return logits

    def _sample(
        self, asked: Sequence[Sequence[RankRequest]], logits: Sequence[torch.Tensor]
    ) -> dict[str, TokenLogprobs]:
        """Rank 0 draws, for the requests whose last known token was computed; the next message tells the others."""
        sampled: dict[str, TokenLogprobs] = {}
        if self._rank != 0:
            return sampled
        for requests, rows in zip(asked, logits, strict=True):
            if not requests:
                continue
            tokens = self._sampler.draw(rows, [_sampling_row(request) for request in requests])
            for request, token in zip(requests, tokens, strict=True):
                sampled[request.request_id] = TokenLogprobs(
                    token_id=token.token_id, logprob=token.logprob, top=token.top
                )
        return sampled

    # Bookkeeping

    def _check_fault(self, stage: str) -> None:
        check_fault(self._plan.config.debug.fault_dir, stage, self._rank)

    def _met_new_shape(self, bucket_name: str) -> None:
        message = f"{bucket_name} was compiled in the middle of a step: the warm-up had not met its shapes"
        if self._plan.config.debug.fail_on_new_shape:
            raise NewShapeError(message)
        logger.warning("%s", message)
        self._metrics.met_new_shape(bucket_name)

    def _occupancy(self) -> EncoderCacheOccupancy:
        cache = self.encoder_cache
        return EncoderCacheOccupancy(
            active_blocks=cache.num_active_blocks,
            free_blocks=cache.num_free_blocks,
            held_blocks=cache.num_held_blocks,
            active_real_tokens=cache.num_active_real_tokens,
        )

    def _digest(self) -> str:
        """Of everything that must be equal on all ranks after a step."""
        hasher = blake3(self.encoder_cache.digest().encode())
        for request_id, request in sorted(self._requests.items()):
            known = (request_id, request.token_ids, request.num_computed_tokens, request.block_ids)
            hasher.update(repr(known).encode())
        return hasher.hexdigest(length=8)


def _sampling_row(request: RankRequest) -> SamplingRow:
    """With the tokens that its parameters look at: copying a long context for each token costs more than drawing."""
    params = request.sampling
    repetition = params.repetition_penalty != 1.0
    reads_output = repetition or params.frequency_penalty or params.presence_penalty or params.min_tokens
    prompt = request.token_ids[: request.num_prompt_tokens] if repetition else ()
    output = request.token_ids[request.num_prompt_tokens :] if reads_output else ()
    return SamplingRow(
        params=params,
        position=len(request.token_ids),
        prompt_token_ids=np.asarray(prompt, np.int64),
        output_token_ids=np.asarray(output, np.int64),
    )
