"""What every test may rely on: logs go where they went before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command run within the test process sends its logs to a screen that is gone afterwards."""
    yield
    structlog.reset_defaults()
