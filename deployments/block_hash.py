"""Prefix hashes of KV blocks: equal only when tokens, images, their positions and the salt are.

A prompt's are made by its Renderer, once for all its choices: those of 128k tokens take some ten milliseconds, in which
an engine that made them would serve nobody. The engine adds those of the blocks that generation fills.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence

from blake3 import blake3

from actors.messages import MMItem

HASH_BYTES = 32
_NO_SALT = bytes(HASH_BYTES)


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], items: Sequence[MMItem], cache_salt: str | None, block_size: int
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that have none yet. `items`: sorted by offset.

    A hash is blake3 over the parent block's hash, the token ids (8 bytes each) and, for every image that overlaps the
    block, (mm_hash, block start minus the image's offset). The first block's parent is the hash of the cache salt.
    """
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    start = first * block_size
    tokens = memoryview(array("q", token_ids[start : end * block_size])).cast("B")
    step = 8 * block_size
    parent = hashes[-1] if hashes else _root(cache_salt)
    keys = _extra_keys(items, start, block_size)
    next_start, key = next(keys, (-1, b""))
    for offset in range(0, len(tokens), step):
        data = parent + tokens[offset : offset + step]
        if start == next_start:
            data += key
            next_start, key = next(keys, (-1, b""))
        parent = blake3(data).digest()
        hashes.append(parent)
        start += block_size


def prompt_hashes(token_ids: Sequence[int], items: Sequence[MMItem], cache_salt: str | None, block_size: int) -> bytes:
    """Of a prompt's full blocks, one after the other, as they travel in an EngineRequest."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, items, cache_salt, block_size)
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def _root(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return _NO_SALT
    return blake3(b"cache_salt:" + cache_salt.encode(errors="surrogatepass")).digest()


def _extra_keys(items: Sequence[MMItem], start: int, block_size: int) -> Iterator[tuple[int, bytes]]:
    """(block start, key) for each block from `start` on that an image overlaps, in order."""
    key = b""
    key_start = -1
    for item in items:
        end = item.offset + item.length
        mm_hash = item.mm_hash.encode()
        block_start = max(start, item.offset - item.offset % block_size)
        while block_start < end:
            if block_start != key_start:
                if key:
                    yield key_start, key
                key_start, key = block_start, b""
            key += struct.pack("<Iq", len(mm_hash), block_start - item.offset) + mm_hash
            block_start += block_size
    if key:
        yield key_start, key
