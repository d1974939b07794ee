"""/metrics over HTTP, as Prometheus and people ask for it."""

from __future__ import annotations

import gzip
import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from elasticd.daemon.api.exposition import takes_gzip
from tests.daemon.scrapes import series
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from elasticd.daemon.api.server import ApiServer
    from tests.daemon.api.world import World

# As Prometheus 2.42 asks.
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/2.42.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}


def ask(api: ApiServer, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    assert api.metrics_address
    connection = http.client.HTTPConnection(*api.metrics_address, timeout=20)
    try:
        connection.request(method, "/metrics", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_prometheus_gets_it_packed(world: World, api: ApiServer) -> None:
    status, headers, body = ask(api, headers=PROMETHEUS)
    assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "Accept-Encoding")
    assert headers["content-type"].startswith("text/plain; version=")
    assert int(headers["content-length"]) == len(body)
    assert series(gzip.decompress(body).decode())["elasticd_test"] == 42


def test_a_person_gets_plain_text(world: World, api: ApiServer) -> None:
    status, headers, body = ask(api)
    assert (status, "content-encoding" in headers) == (200, False)
    assert b"elasticd_test 42.0\n" in body


def test_head_says_as_much_as_get_without_the_body(world: World, api: ApiServer) -> None:
    status, headers, body = ask(api, "HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == ask(api)[1]["content-length"]


@pytest.mark.parametrize(
    ("accepted", "taken"),
    [("gzip", True), ("deflate, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.000, br", False), ("identity", False), ("", False), ("xgzip", False)],
)
def test_it_is_packed_for_who_can_unpack_it(accepted: str, taken: bool) -> None:
    assert takes_gzip(accepted) is taken


class Slow(Collector):
    """Numbers that take until somebody lets them come."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.count = 0

    def collect(self) -> Iterable[Metric]:
        self.count += 1
        assert self.gate.wait(20)
        yield GaugeMetricFamily("elasticd_slow", "A number.", value=self.count)


def test_scrapes_do_not_pile_up_and_hold_up_nobody_else(world: World, api: ApiServer) -> None:
    slow = Slow()
    world.registry.register(slow)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask, api) for _ in range(20)]
        await_(lambda: slow.count == 1, what="a scrape")
        assert world.client.text("/healthz") == (200, "ok\n")
        slow.gate.set()
        answers = [one.result() for one in asked]
    assert {status for status, _, _ in answers} == {200}
    assert slow.count <= 3, "the first, and at most one for those that came when it had ended"
    before = slow.count
    assert b"elasticd_slow" in ask(api)[2]
    assert slow.count == before + 1, "what is asked for later is looked up anew"


def test_one_who_hangs_up_takes_nothing_from_the_others(world: World, api: ApiServer) -> None:
    slow = Slow()
    world.registry.register(slow)
    assert api.metrics_address
    gone = http.client.HTTPConnection(*api.metrics_address, timeout=20)
    gone.request("GET", "/metrics")
    await_(lambda: slow.count == 1, what="a scrape")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, api)
        gone.close()
        slow.gate.set()
        assert asked.result()[0] == 200


def test_a_collector_that_fails_is_a_fault_and_the_next_scrape_works(world: World, api: ApiServer) -> None:
    class Broken(Collector):
        def collect(self) -> Iterable[Metric]:
            raise RuntimeError("secret")

    broken = Broken()
    world.registry.register(broken)
    status, _, body = ask(api)
    assert (status, b"secret" in body) == (500, False)
    world.registry.unregister(broken)
    assert ask(api)[0] == 200
