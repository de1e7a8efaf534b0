"""Which addresses a remote image may be fetched from: those of the public internet, whatever name led there."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Resolve = Callable[[str, int], Awaitable[list[str]]]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NEVER = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # carrier-grade NAT; Alibaba Cloud's metadata
        "168.63.129.16/32",  # Azure's metadata, on an address that is public elsewhere
        "192.0.0.0/24",  # protocol assignments; Oracle Cloud's metadata
        "192.88.99.0/24",  # the relays of 6to4
        "2001::/23",  # protocol assignments, among them Teredo, which wraps IPv4
        "2002::/16",  # 6to4, which wraps IPv4
        "3fff::/20",  # documentation
    )
)


def is_public(address: str) -> bool:
    """Whether an address, as a resolver wrote it, is one of the public internet's own hosts.

    Loopback, private, link-local, carrier-grade NAT, multicast, reserved and documentation addresses are not, nor are
    the metadata services of clouds. An IPv4 address inside an IPv6 one (mapped, NAT64) counts as what it is; the other
    ways to write one there are refused.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # also one with a zone, "fe80::1%eth0"
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if parsed in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)))
        if parsed.scope_id is not None or parsed not in _GLOBAL_UNICAST:
            return False
    return parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _NEVER)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host in the order in which to try them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True)
class Network:
    """The outside as a fetch sees it; tests put a resolver and addresses of their own here, settings cannot."""

    resolve: Resolve = resolve
    is_allowed: Callable[[str], bool] = is_public
    trusted: ssl.SSLContext | None = None
    """The certificates that are trusted; None: those that httpx brings."""
