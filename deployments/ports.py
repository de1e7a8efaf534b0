"""The ports of an application on this machine, so that two applications never answer each other's clients.

Serve's proxies and HAProxy bind with SO_REUSEPORT: of a port that both have, each gets a part of the connections, and
nothing says so.
"""

import os
import random
import socket
from pathlib import Path

import yaml

DEFAULT_HTTP_PORT = 8000
HAPROXY = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
"""Where people look for HAProxy's pages, by default."""

FALLBACK = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"
"""Where HAProxy sends requests while no Renderer is there."""

_BELOW_EPHEMERAL = range(20000, 30000)


def http_port(config: str | Path) -> int:
    """Of a Serve config file."""
    tree = yaml.safe_load(Path(config).read_text())
    return int((tree.get("http_options") or {}).get("port", DEFAULT_HTTP_PORT))


def is_free(port: int) -> bool:
    """Whether nobody listens on it, at any address of this machine."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def of_haproxy() -> dict[str, str]:
    """Ports for the variables that are not set: the usual ones where they are free, and for the fallback any."""
    chosen = {name: port if is_free(port) else any_free() for name, port in HAPROXY.items()}
    chosen[FALLBACK] = any_free()
    return {name: str(port) for name, port in chosen.items() if name not in os.environ}


def any_free() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody who asks for any."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        if is_free(port):
            return port
