"""Waiting for what may never answer: a driver, a dead file server.

Owns: one call on a thread of its own, left behind when it is late. Must not: know what is called.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], *, name: str) -> T:
    """What `call` returns or raises.

    Args:
        seconds: to wait for it.
        call: is left running when it is late; nobody takes its answer then.
        name: of its thread.

    Raises:
        TimeoutError: it is late.
    """
    answers: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        answer, fault = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if fault is not None:
        raise fault
    return answer  # type: ignore[return-value]  # with no fault it is a T, which mypy does not carry over the unpacking
