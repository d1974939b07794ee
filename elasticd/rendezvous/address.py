"""Which address of this machine others reach it by.

Owns: asking the routing table. Must not: choose between addresses or word an error; callers know what their user can change.
"""

from __future__ import annotations

import socket


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
