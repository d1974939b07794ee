"""Which interface bears an address, asked of the real kernel."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elasticd.rendezvous.address import address_on_the_way_to, interface_of


def test_the_interface_of_an_address_of_this_machine_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists() or "lo" not in Path("/proc/net/if_inet6").read_text(), reason="no IPv6 on this machine")
def test_ipv6_too() -> None:
    assert interface_of("::1") == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "", "127.0.0.300"])
def test_what_is_no_address_of_this_machine_has_none(address: str) -> None:
    assert interface_of(address) == ""


def test_the_address_on_the_way_to_a_listener_of_this_machine_is_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert address_on_the_way_to(f"127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"
