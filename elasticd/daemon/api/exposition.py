"""/metrics: the registry as text, packed if whoever asks can unpack it.

Owns: that scrapes do not pile up: one is made at a time, on a thread of its own, and whoever asks meanwhile gets the same. Must not: know a metric.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, to_thread
from fastapi.responses import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Exposition:
    """Used by one event loop.

    Args:
        registry: what is shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._limiter = CapacityLimiter(1)  # a thread of its own: those of the API may all be waiting for etcd
        self._running: asyncio.Task[bytes] | None = None

    async def answer(self, accepted: str) -> Response:
        """The answer to one scrape.

        Args:
            accepted: what its Accept-Encoding says.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(to_thread.run_sync(lambda: generate_latest(self._registry), limiter=self._limiter))
        text = await asyncio.shield(self._running)  # one who hangs up does not end it for the others
        headers = {"Vary": "Accept-Encoding"}
        if takes_gzip(accepted):
            text = gzip.compress(text, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        return Response(text, media_type=CONTENT_TYPE_LATEST, headers=headers)


def takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding allows gzip (RFC 9110, 12.5.3), as far as scrapers say it."""
    for part in accepted.split(","):
        name, _, quality = part.partition(";")
        if name.strip().lower() == "gzip":
            return quality.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
