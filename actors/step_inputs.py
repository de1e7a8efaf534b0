"""Turns the requests of a step into the padded, fixed-shape inputs of a graph. Index arithmetic only.

Padding tokens write to the scratch KV block and read the scratch row of the encoder cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from actors.plan import EnginePlan, bucket
from actors.rank_request import RankRequest
from neuron.encoder_cache_blocks import EncoderCacheBlocks
from neuron.models.interface import DecodeInputs, ImageInputs, PrefillInputs

Chunk = tuple[RankRequest, int]
"""A request and how many of its tokens to compute."""


class PrefillCall(NamedTuple):
    """One execution of the prefill graph."""

    bucket_name: str
    num_tokens: int
    """Without padding."""
    inputs: PrefillInputs
    images: ImageInputs | None
    sampled: list[RankRequest]
    """Requests whose last known token is computed here: row i of the logits is theirs."""


class DecodeCall(NamedTuple):
    """One execution of the decode graph; row i of the logits is the i-th request's."""

    bucket_name: str
    num_tokens: int
    """Without padding: one per sequence."""
    inputs: DecodeInputs


class StepInputs:
    """Builds inputs for one engine plan; `encoder_cache` is the rank's whole buffer [rows, columns]."""

    def __init__(self, plan: EnginePlan, blocks: EncoderCacheBlocks, encoder_cache: torch.Tensor) -> None:
        self._plan = plan
        self._blocks = blocks
        self._encoder_cache = encoder_cache
        self._block_size = plan.config.kv_cache.block_size
        self._scratch_block = plan.config.kv_cache.planned_num_blocks
        self._scratch_slot = self._scratch_block * self._block_size
        self._scratch_row = (plan.config.encoder_cache.num_blocks - 1) * plan.config.encoder_cache.block_size
        self._max_seqs = plan.config.scheduler.max_num_seqs

    def split(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Group a step's chunks, in order, so that each group fits the largest prefill graph."""
        groups: list[list[Chunk]] = []
        room_tokens = room_context = 0
        for request, tokens in chunks:
            context = request.num_computed_tokens + tokens
            if tokens > room_tokens or context > room_context or len(groups[-1]) == self._max_seqs:
                groups.append([])
                room_tokens, room_context = self._plan.prefill_tokens[-1], self._plan.context_tokens[-1]
            groups[-1].append((request, tokens))
            room_tokens -= tokens
            room_context -= context
        return groups

    def images(self, chunks: Sequence[Chunk]) -> ImageInputs | None:
        """Where the chunks' image tokens lie in the encoder cache; None when they have none."""
        padded_tokens = bucket(self._plan.prefill_tokens, sum(count for _, count in chunks))
        embed_rows = np.full(padded_tokens, self._scratch_row, np.int64)
        is_image = np.zeros(padded_tokens, bool)
        at = 0
        for request, count in chunks:
            start, here = request.num_computed_tokens, slice(at, at + count)
            self._mark_images(request, start, start + count, embed_rows[here], is_image[here])
            at += count
        if not is_image.any():
            return None
        return ImageInputs(self._encoder_cache, torch.from_numpy(embed_rows), torch.from_numpy(is_image))

    def prefill(self, chunks: Sequence[Chunk], images: ImageInputs | None) -> PrefillCall:
        """Pack the chunks flat; see PrefillInputs for shapes. `images`: of the same chunks."""
        tokens = sum(count for _, count in chunks)
        context = sum(request.num_computed_tokens + count for request, count in chunks)
        padded_tokens = bucket(self._plan.prefill_tokens, tokens)
        padded_context = bucket(self._plan.context_tokens, max(context, padded_tokens))
        arrays = self._empty_prefill(padded_tokens, padded_context)
        sampled: list[RankRequest] = []
        at, context_at = 0, 0
        for seq, (request, count) in enumerate(chunks):
            start, stop = request.num_computed_tokens, request.num_computed_tokens + count
            here, there = slice(at, at + count), slice(context_at, context_at + stop)
            slots = request.slots(0, stop, self._block_size)
            arrays["token_ids"][here] = request.token_ids[start:stop]
            arrays["rope_positions"][:, here] = request.rope_positions(start, stop)
            arrays["slot_mapping"][here] = slots[start:]
            arrays["query_seq"][here] = seq
            arrays["query_pos"][here] = np.arange(start, stop)
            arrays["context_slots"][there] = slots
            arrays["context_seq"][there] = seq
            arrays["context_pos"][there] = np.arange(stop)
            if stop == len(request.token_ids):
                arrays["logits_index"][len(sampled)] = at + count - 1
                sampled.append(request)
            at, context_at = at + count, context_at + stop
        inputs = PrefillInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        graph = "prefill_images" if images is not None else "prefill"
        return PrefillCall(f"{graph}/{padded_tokens}x{padded_context}", tokens, inputs, images, sampled)

    def _mark_images(
        self, request: RankRequest, start: int, stop: int, embed_rows: np.ndarray, is_image: np.ndarray
    ) -> None:
        """Point the image tokens among the positions [start, stop) at their rows of the encoder cache."""
        for item in request.mm_items:
            first, last = max(item.offset, start), min(item.offset + item.length, stop)
            if first < last:
                rows = np.asarray(self._blocks.rows(item.mm_hash), np.int64)
                embed_rows[first - start : last - start] = rows[first - item.offset : last - item.offset]
                is_image[first - start : last - start] = True

    def decode(self, requests: Sequence[RankRequest]) -> DecodeCall:
        """The newest token of each request; see DecodeInputs for shapes."""
        rows = len(requests)
        positions = [request.num_computed_tokens for request in requests]
        seqs = bucket(self._plan.decode_seqs, rows)
        context = bucket(self._plan.context_tokens, max(positions) + 1)
        arrays = self._empty_decode(seqs, context)
        arrays["token_ids"][:rows] = [request.token_ids[at] for request, at in zip(requests, positions, strict=True)]
        arrays["context_lens"][:rows] = positions
        arrays["context_lens"][:rows] += 1
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            block, offset = divmod(position, self._block_size)
            arrays["rope_positions"][:, row] = request.rope_position(position)
            arrays["slot_mapping"][row] = request.block_ids[block] * self._block_size + offset
            arrays["block_tables"][row, : block + 1] = request.blocks[: block + 1]
        inputs = DecodeInputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        return DecodeCall(f"decode/{seqs}x{context}", len(requests), inputs)

    def padding(self, graph: str, rows: int, context: int) -> PrefillCall | DecodeCall:
        """Inputs of a graph that hold one token in scratch space and padding, for the warm-up."""
        name = f"{graph}/{rows}x{context}"
        if graph == "decode":
            arrays = self._empty_decode(rows, context)
            arrays["context_lens"][0] = 1
            return DecodeCall(name, 0, DecodeInputs(**{key: torch.from_numpy(array) for key, array in arrays.items()}))
        arrays = self._empty_prefill(rows, context)
        arrays["query_seq"][0] = arrays["context_seq"][0] = 0
        inputs = PrefillInputs(**{key: torch.from_numpy(array) for key, array in arrays.items()})
        images = None
        if graph == "prefill_images":
            scratch = torch.full((rows,), self._scratch_row, dtype=torch.int64)
            images = ImageInputs(self._encoder_cache, scratch, torch.zeros(rows, dtype=torch.bool))
        return PrefillCall(name, 0, inputs, images, [])

    def _empty_prefill(self, tokens: int, context: int) -> dict[str, np.ndarray]:
        return {
            "token_ids": np.zeros(tokens, np.int64),
            "rope_positions": np.zeros((3, tokens), np.int64),
            "slot_mapping": np.full(tokens, self._scratch_slot, np.int64),
            "query_seq": np.full(tokens, -1, np.int64),
            "query_pos": np.zeros(tokens, np.int64),
            "context_slots": np.full(context, self._scratch_slot, np.int64),
            "context_seq": np.full(context, -1, np.int64),
            "context_pos": np.zeros(context, np.int64),
            "logits_index": np.zeros(self._max_seqs, np.int64),
        }

    def _empty_decode(self, seqs: int, context: int) -> dict[str, np.ndarray]:
        return {
            "token_ids": np.zeros(seqs, np.int64),
            "rope_positions": np.zeros((3, seqs), np.int64),
            "slot_mapping": np.full(seqs, self._scratch_slot, np.int64),
            "block_tables": np.full((seqs, context // self._block_size), self._scratch_block, np.int64),
            "context_lens": np.zeros(seqs, np.int64),
        }
