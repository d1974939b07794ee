"""What the libraries of this project log while a command runs.

Owns: keeping it off the screen. Must not: hide an error that a command does not report by itself.
"""

from __future__ import annotations

import logging
import sys

import structlog


def quiet_logs() -> None:
    """Errors only, as lines on stderr. structlog's default is everything, on stdout, which is for data."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer(key_order=["level", "event"])],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
