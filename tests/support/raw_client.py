"""An HTTP client that does what a library would not: stops in the middle, breaks the connection, does not read."""

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any


class RawClient:
    """One connection, one request."""

    def __init__(self, port: int, receive_buffer: int | None = None, timeout: float = 60.0) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:  # before connecting: the window is agreed on then
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect(("127.0.0.1", port))

    def send(self, path: str, body: dict[str, Any], share: float = 1.0) -> None:
        """The request, or the first `share` of its bytes."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        message = head.encode() + content
        self.socket.sendall(message[: int(len(message) * share)])

    def lines(self, chunk: int = 65536) -> Iterator[bytes]:
        """What arrives, line by line, `chunk` bytes at a time; ends with the connection."""
        rest = b""
        while data := self.socket.recv(chunk):
            *whole, rest = (rest + data).split(b"\n")
            yield from whole
        yield rest

    def events(self, chunk: int = 65536) -> Iterator[dict[str, Any]]:
        """The server-sent events' data, up to [DONE]."""
        for line in self.lines(chunk):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))

    def leave(self, abruptly: bool = False) -> None:
        """Close the connection; `abruptly`: with a reset, as a client that was killed."""
        if abruptly:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
