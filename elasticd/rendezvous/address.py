"""Which address of this machine others reach it by, and which interface bears it.

Owns: asking the kernel. Must not: choose between addresses or word an error; callers know what their user can change.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def address_on_the_way_to(endpoint: str) -> str:
    """The address of this machine that its packets to `endpoint` ("host:port") bear. Nothing is sent: a datagram socket only looks up its route.

    Raises:
        OSError: the host's name does not resolve, or no route leads there.
        ValueError: the port is no number.
    """
    host, _, port = endpoint.rpartition(":")
    family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name of the interface that bears an address of this machine (or the first to which a host name resolves), "" if none does."""
    wanted = set()
    with suppress(OSError, ValueError):
        wanted = {ipaddress.ip_address(str(found[4][0]).partition("%")[0]) for found in socket.getaddrinfo(address, None)}
    borne = {**_ipv6(), **_ipv4()}
    return next((name for candidate, name in borne.items() if candidate in wanted), "")


def _ipv4() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[ipaddress.IPv4Address(answer[20:24])] = name
    return found


def _ipv6() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        return {ipaddress.IPv6Address(int(fields[0], 16)): fields[5] for fields in lines if len(fields) == 6}
    return {}
