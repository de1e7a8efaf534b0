"""Prefix hashes of KV blocks: equal only when tokens, images, their positions and the salt are."""

import struct
from array import array
from collections.abc import Iterator, Sequence

from blake3 import blake3

from actors.messages import MMItem
from deployments.scheduler.request import Request

_NO_SALT = bytes(32)


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Append the hashes of the request's full blocks that have none yet.

    A hash is blake3 over the parent block's hash, the token ids (8 bytes each) and, for every image that overlaps the
    block, (mm_hash, block start minus the image's offset). The first block's parent is the hash of the cache salt.
    """
    hashes = request.block_hashes
    first, end = len(hashes), request.num_tokens // block_size
    if first >= end:
        return
    start = first * block_size
    tokens = memoryview(array("q", request.token_ids[start : end * block_size])).cast("B")
    step = 8 * block_size
    parent = hashes[-1] if hashes else _root(request.cache_salt)
    keys = _extra_keys(request.mm_items, start, block_size)
    next_start, key = next(keys, (-1, b""))
    for offset in range(0, len(tokens), step):
        data = parent + tokens[offset : offset + step]
        if start == next_start:
            data += key
            next_start, key = next(keys, (-1, b""))
        parent = blake3(data).digest()
        hashes.append(parent)
        start += block_size


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
