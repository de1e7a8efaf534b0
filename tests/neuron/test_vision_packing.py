"""Properties of the packing: every image once, nothing overlaps, everything fits, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron.vision_packing import pack

MERGE = 4
BUCKETS = (128, 256, 1024)


@given(st.lists(st.integers(1, 256).map(lambda n: n * MERGE), max_size=40), st.sampled_from([1, 2, 4, 16]))
def test_every_image_has_one_place_of_its_own(sizes: list[int], world_size: int) -> None:
    items = [(f"hash{index}", size) for index, size in enumerate(sizes)]
    rounds = pack(items, BUCKETS, world_size, MERGE)
    placed: dict[str, int] = {}
    for round_ in rounds:
        assert round_.num_patches in BUCKETS
        assert round_.num_rows * MERGE == round_.num_patches
        assert len(round_.blocks) == world_size
        assert any(round_.blocks)
        for block in round_.blocks:
            end = 0
            for image in block:
                assert image.patch_offset == end  # no gaps, no overlap
                assert (image.row_offset * MERGE, image.num_rows * MERGE) == (image.patch_offset, image.num_patches)
                assert image.mm_hash not in placed
                placed[image.mm_hash] = image.num_patches
                end += image.num_patches
            assert end <= round_.num_patches
    assert placed == dict(items)
    assert pack(items, BUCKETS, world_size, MERGE) == rounds


@given(st.lists(st.integers(1, 256).map(lambda n: n * MERGE), min_size=1, max_size=40))
def test_no_two_blocks_could_be_one(sizes: list[int]) -> None:
    """First fit: an image opens a block only when no earlier one has room."""
    rounds = pack([(str(i), size) for i, size in enumerate(sizes)], BUCKETS, 1, MERGE)
    limit = next(bucket for bucket in BUCKETS if bucket >= max(sizes))
    fills = [sum(image.num_patches for image in round_.blocks[0]) for round_ in rounds]
    first = [round_.blocks[0][0].num_patches for round_ in rounds]
    for later in range(1, len(fills)):
        assert all(fill + first[later] > limit for fill in fills[:later])


def test_blocks_are_dealt_in_rounds_and_small_rounds_take_small_blocks() -> None:
    rounds = pack([("a", 200), ("b", 196), ("c", 100), ("d", 8)], BUCKETS, 2, MERGE)
    assert [[[image.mm_hash for image in block] for block in round_.blocks] for round_ in rounds] == [
        [["a", "d"], ["b"]],
        [["c"], []],
    ]
    assert [round_.num_patches for round_ in rounds] == [256, 128]
    assert rounds[0].blocks[0][1].row_offset == 50


def test_nothing_to_encode_is_no_round() -> None:
    assert pack([], BUCKETS, 4, MERGE) == []


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", 1028)], "buckets.vision_patches"),
        ([("a", 6)], "multiple of 4"),
        ([("a", 8), ("a", 8)], "given twice"),
    ],
)
def test_what_cannot_be_packed_is_named(items: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(items, BUCKETS, 4, MERGE)
