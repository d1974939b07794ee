"""What the API answers is what its OpenAPI document says: status codes, content types and the shape of every body, seen by a tool that is not ours.

Schemathesis is none of the development dependencies: it brings a dozen packages, and test_fuzz.py tries the same without it. `pip install schemathesis`
into an environment beside this one runs it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.daemon.api.test_fuzz import prepare
from tests.daemon.api.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticd.daemon.api.server import ApiServer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@contextlib.contextmanager
def over_tcp(path: Path) -> Iterator[str]:
    """The unix socket on a port of this machine, since the tool speaks TCP alone; its URL."""
    server = socket.create_server(("127.0.0.1", 0))
    ending = threading.Event()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def carry(one: socket.socket) -> None:
        with one, socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
            back = threading.Thread(target=pump, args=(other, one))
            back.start()
            pump(one, other)
            back.join()

    def accept() -> None:
        carried = []
        while True:
            one, _ = server.accept()
            if ending.is_set():
                one.close()
                break
            carried.append(threading.Thread(target=carry, args=(one,)))
            carried[-1].start()
        for thread in carried:
            thread.join(30.0)

    thread = threading.Thread(target=accept)
    thread.start()
    host, port = server.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        ending.set()
        socket.create_connection((host, port)).close()
        thread.join(60.0)
        server.close()


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_answer_is_as_the_document_says(world: World, api: ApiServer) -> None:
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    prepare(world)
    asked = 0
    with over_tcp(world.config.socket) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()

            @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def check(case: object) -> None:
                nonlocal asked
                asked += 1
                # What a schema allows may be refused all the same: 3.0 is an integer to JSON schema, and not to us.
                case.call_and_validate(headers={"Connection": "close"}, excluded_checks=[positive_data_acceptance])  # type: ignore[attr-defined]

            check()
    assert asked > 500
