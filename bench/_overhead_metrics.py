"""What a scrape costs: a node of eight ranks and eight GPUs in which every metric has a number, asked over HTTP as Prometheus does.

The job's report is a file that is written anew before each scrape, and a second lies between two, so that nothing is told twice from memory. NVML is
a stand-in that answers at once: what a driver takes is not in it, and no scrape waits for one longer than 10 ms.

    python -m bench._overhead_metrics [SCRAPES]
"""

from __future__ import annotations

import gzip
import http.client
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench._common import Row, print_table
from elasticd.daemon.api.app import make_app
from elasticd.daemon.api.server import ApiServer
from elasticd.daemon.operations import Operations
from tests.daemon.scrapes import Node, eight_gpus, report, series, turn
from tests.support.nvml import StandInNvml

PAUSE: Final = 1.05
"""Seconds between two scrapes: values are looked up once a second at most."""


def scrapes(count: int) -> list[Row]:
    """How long they take, and how many series there are."""
    with ExitStack() as stack:
        sys.modules["pynvml"] = StandInNvml(gpus=eight_gpus())  # type: ignore[assignment]  # as much of it as is asked
        stack.callback(sys.modules.pop, "pynvml")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-metrics-")))
        node = Node(folder, metrics={"listen": "127.0.0.1:0"}, api={"socket": str(folder / "api.sock")})
        stack.callback(node.close)
        node.board.post(turn())
        server = ApiServer(make_app(Operations(node.kv, node.kv, node.config.keys, node.board), node.board, node.config, node.registry), node.config)
        server.start()
        stack.callback(server.stop, 2.0)
        assert server.metrics_address
        took, found = [], {}
        for number in range(count + 1):
            node.write(report(step=number))
            began = time.perf_counter()
            text = _ask(*server.metrics_address)
            took.append(1000 * (time.perf_counter() - began))
            found = series(text)
            time.sleep(PAUSE)
    times = took[1:]  # the first waits for what was never looked up
    return [
        Row.of("metrics_ms", "elasticd", times, unit="ms", note=f"of {len(times)} scrapes, packed, a connection each"),
        Row.of("metrics_series", "elasticd", [float(len(found))], unit="", note="8 ranks, 8 GPUs, one job; certificates and Xids add 22 at most"),
    ]


def _ask(host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        return gzip.decompress(connection.getresponse().read()).decode()
    finally:
        connection.close()


if __name__ == "__main__":
    print_table(scrapes(int(sys.argv[1]) if len(sys.argv) > 1 else 20), title="what a scrape costs")
