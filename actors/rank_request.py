"""What a rank remembers of a request between steps."""

from dataclasses import dataclass, field

import numpy as np

from actors.messages import MMItem, NewRequest, RunningRequest, SamplingParams
from telemetry import spans


@dataclass
class RankRequest:
    """Kept in lockstep on every rank: changed by messages only."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, then what was generated."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks before this step."""
    block_ids: list[int]
    sampling: SamplingParams
    mm_items: tuple[MMItem, ...]
    rope: np.ndarray
    """[3, known tokens when it was sent] rotary positions, int64."""
    rope_delta: int
    """A token at position i behind those sits at rotary position i + rope_delta."""
    trace: spans.Link | None = None
    """To the request's root span; None when its trace is not recorded."""
    _blocks: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def from_message(cls, new: NewRequest, rope: np.ndarray, rope_delta: int) -> "RankRequest":
        return cls(
            request_id=new.request_id,
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            sampling=new.sampling,
            mm_items=new.mm_items,
            rope=rope,
            rope_delta=rope_delta,
            trace=spans.link_to(new.trace_context),
        )

    def update(self, change: RunningRequest) -> None:
        self.token_ids.extend(change.new_token_ids)
        self.num_computed_tokens = change.num_computed_tokens
        if change.new_block_ids:
            self.block_ids.extend(change.new_block_ids)
            self._blocks = None

    @property
    def blocks(self) -> np.ndarray:
        """`block_ids` as int64."""
        if self._blocks is None:
            self._blocks = np.asarray(self.block_ids, np.int64)
        return self._blocks

    def slots(self, start: int, stop: int, block_size: int) -> np.ndarray:
        """KV slots of the positions [start, stop), int64."""
        positions = np.arange(start, stop)
        return self.blocks[positions // block_size] * block_size + positions % block_size

    def rope_positions(self, start: int, stop: int) -> np.ndarray:
        """Rotary positions [3, stop - start] of the positions [start, stop), int64."""
        known = self.rope[:, start:stop]
        behind = np.arange(max(start, self.rope.shape[1]), stop) + self.rope_delta
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)

    def rope_position(self, position: int) -> np.ndarray | int:
        """Rotary positions [3] of one position; a number where all three are the same."""
        return self.rope[:, position] if position < self.rope.shape[1] else position + self.rope_delta
