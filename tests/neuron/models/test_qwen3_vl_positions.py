"""M-RoPE and patch positions, against transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron.models import family_of
from neuron.models.interface import MRopeItem
from tests.neuron.models.reference import Reference, make_checkpoint

GRIDS = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(lambda hw: (1, 2 * hw[0], 2 * hw[1]))
PARTS = st.lists(st.one_of(st.integers(1, 9), GRIDS), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_mrope_positions_are_those_of_transformers(folder: Path, reference: Reference) -> None:
    family = family_of(folder)
    config = family.load_config(folder)

    @given(PARTS)
    def check(parts: list) -> None:
        types: list[int] = []
        items: list[MRopeItem] = []
        for part in parts:
            if isinstance(part, int):
                types += [0] * part
            else:
                length = part[1] * part[2] // 4
                types.append(0)  # <|vision_start|>
                items.append(MRopeItem(len(types), length, part))
                types += [1] * length
        positions, delta = family.mrope_positions(config, len(types), items)
        expected, expected_delta = reference.model.model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            torch.tensor([types]),
            image_grid_thw=torch.tensor([item.grid for item in items]) if items else None,
        )
        np.testing.assert_array_equal(positions, expected[:, 0].numpy())
        assert positions.dtype == np.int64
        assert delta == int(expected_delta)

    check()


def test_tokens_behind_the_prompt_sit_at_the_delta(folder: Path) -> None:
    family = family_of(folder)
    config = family.load_config(folder)
    items = [MRopeItem(4, 12, (1, 4, 12)), MRopeItem(20, 4, (1, 4, 4))]
    positions, delta = family.mrope_positions(config, 30, items)
    longer, same = family.mrope_positions(config, 50, items)
    assert delta == same
    np.testing.assert_array_equal(longer[:, :30], positions)
    np.testing.assert_array_equal(longer[:, 30:], np.arange(30, 50) + delta + np.zeros((3, 1)))


def test_a_range_that_does_not_match_its_grid_is_refused(folder: Path) -> None:
    family = family_of(folder)
    with pytest.raises(ValueError, match="11 tokens, expected 12"):
        family.mrope_positions(family.load_config(folder), 30, [MRopeItem(4, 11, (1, 4, 12))])


def test_a_vision_block_that_overflows_is_refused(folder: Path) -> None:
    family = family_of(folder)
    config = family.load_config(folder)
    pixels = np.zeros((16, config.patch_dim), dtype=np.float32)
    with pytest.raises(ValueError, match="2 images of 32 patches do not fit a vision block of 16"):
        family.prepare_vision_block(config, [(pixels, (1, 4, 4))] * 2, 16)
    with pytest.raises(ValueError, match="for grid"):
        family.prepare_vision_block(config, [(pixels, (1, 4, 8))], 64)
