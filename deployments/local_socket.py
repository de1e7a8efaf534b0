"""Messages over a local socket between processes of one user on one node, each behind its length."""

import asyncio
import os
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group id, as the kernel tells them of a local socket's other end."""


def new_socket() -> socket.socket:
    """To give to the event loop: uvloop itself knows no abstract addresses."""
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new.setblocking(False)
    return new


def is_own_user(connection: Any) -> bool:
    """Whether the other end belongs to this process's user: an abstract socket has no file whose mode would say so."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:  # uvloop's own has no getsockopt
        credentials = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The next one. Raises asyncio.IncompleteReadError, or OSError, where the other end has gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
