"""Closing of async iterators, to the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

_closing: set["asyncio.Future[None]"] = set()


async def close(*iterators: AsyncIterator[Any], after: Sequence["asyncio.Future[Any]"] = ()) -> None:
    """Close iterators once `after` is done, to the end even where the caller is being cancelled meanwhile."""

    async def close_each() -> None:
        await asyncio.gather(*after, return_exceptions=True)
        for iterator in iterators:
            if (aclose := getattr(iterator, "aclose", None)) is not None:
                await aclose()

    task = asyncio.ensure_future(close_each())
    _closing.add(task)  # asyncio itself holds tasks weakly
    task.add_done_callback(_closing.discard)
    await asyncio.shield(task)
