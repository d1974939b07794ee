"""Signals mean what they are to mean, whenever they come. Real ones, sent to this process."""

from __future__ import annotations

import queue
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from elasticd.agent.signals import Errand, Signals

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(30)
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Agent:
    """Notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def leave(self) -> None:
        self.asked.append("leave")

    def ask_checkpoint(self) -> None:
        self.asked.append("checkpoint")


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_leave_that_comes_early_waits_for_the_agent(number: signal.Signals) -> None:
    """While torch is imported, say."""
    signals, agent = Signals(), Agent()
    send(number)
    signals.on_hangup(None)
    signals.reach(agent)
    assert agent.asked == ["leave"]
    send(number)
    assert agent.asked == ["leave", "leave"]


def test_a_wish_for_a_checkpoint_is_passed_on_and_before_anything_trains_dropped() -> None:
    """It ends nobody."""
    signals, agent = Signals(), Agent()
    send(signal.SIGUSR1)
    signals.reach(agent)
    send(signal.SIGUSR1)
    assert agent.asked == ["checkpoint"]


def test_hanging_up_reloads_under_a_daemon() -> None:
    """One that came before anything was read has nothing to reload."""
    signals, agent = Signals(), Agent()
    reloads: list[int] = []
    send(signal.SIGHUP)
    signals.on_hangup(lambda: reloads.append(1))
    signals.reach(agent)
    assert (reloads, agent.asked) == ([], [])
    send(signal.SIGHUP)
    assert (reloads, agent.asked) == ([1], [])


def test_hanging_up_means_to_leave_otherwise_also_when_it_comes_early() -> None:
    """The terminal is gone."""
    signals, agent = Signals(), Agent()
    send(signal.SIGHUP)
    signals.on_hangup(None)
    signals.reach(agent)
    send(signal.SIGHUP)
    assert agent.asked == ["leave", "leave"]


def test_an_errand_is_run_beside_the_main_thread_each_time_it_is_asked_for() -> None:
    """A slow disk holds up nobody who watches workers."""
    gate, done = threading.Event(), queue.SimpleQueue[int]()

    def slow() -> None:
        gate.wait(10.0)
        done.put(threading.get_native_id())

    errand = Errand("errand", slow)
    errand.ask()
    errand.ask()  # did not wait for the first
    gate.set()
    threads = {done.get(timeout=10.0), done.get(timeout=10.0)}
    errand.close()
    assert threads != {threading.get_native_id()}
    assert done.empty()
    assert "errand" not in {thread.name for thread in threading.enumerate()}
