"""What every test may rely on: logs go where they went before it, and signals that ask a process to end are heard."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, one under nohup hang-ups too; what tests start would inherit that, and respect it."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command run within the test process sends its logs to a screen that is gone afterwards."""
    yield
    structlog.reset_defaults()
