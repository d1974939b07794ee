"""The session as a worker of agents: snapshots, stops, checkpoints and the state to begin with, over the real channel and in real buffers."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.worlds import Ranks, run, world
from tests.trainer import _agents as agents
from tests.trainer import _programs as programs
from tests.trainer._agents import Agent
from trainer.agent import AgentKeeper, inherited_socket
from trainer.errors import EXIT_STOPPED, ChannelError
from trainer.wire import channel
from trainer.wire.board import EMPTY
from trainer.wire.extras import unpack_extras
from trainer.wire.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)
STEPS = 20


class Site:
    """Nodes with an agent each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[Agent] = []
        self._stack = ExitStack()

    def start(self, count: int, *, nodes: int = 1, program: str = "train", options: dict[str, Any] | None = None, **arguments: Any) -> Ranks:
        """Ranks on some nodes, with fresh agents made with `options`."""
        self.agents = []
        for node in range(nodes):
            path = self.folder / f"agent-{node}"
            path.unlink(missing_ok=True)
            self.agents.append(Agent(path=path, local_world=count // nodes, **(options or {})))
            self._stack.callback(self.agents[-1].close)
        sockets = [str(agent.path) for agent in self.agents]
        folder = self.folder / "run"
        return self._stack.enter_context(world(agents.under_agent, count, folder, nodes=nodes, name=program, sockets=sockets, **arguments))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_join_takes_the_descriptor_out_of_sight(tmp_path: Path) -> None:
    agent = Agent(path=tmp_path / "agent", local_world=1)
    assert run(agents.joined, 1, tmp_path / "run", sockets=[str(agent.path)]) == [{"variable": None, "inheritable": False, "generation": 5, "step": 0}]
    ((_, hello),) = agent.messages(channel.Hello)
    assert (hello.rank, hello.local_rank, hello.version) == (0, 0, channel.VERSION)
    agent.close()


def test_every_step_is_in_the_buffers_of_every_node_byte_for_byte(site: Site) -> None:
    """Batch norm included, whose running means differ between ranks."""
    ranks = site.start(4, nodes=2, max_steps=6, step_seconds=0.2, options={"settings": {"snapshot_every": 1}}, net={"norm": True})
    ranks.results()
    held = [agent.valid() for agent in site.agents]
    assert [one.order for one in held[0]] == [(5, 6), (5, 5), (5, 4)]
    assert [one.order for one in held[1]] == [(5, 6), (5, 5), (5, 4)]
    shelves = [agent.shelf for agent in site.agents]
    assert shelves[0] is not None
    assert shelves[1] is not None
    for one, other in zip(*held, strict=True):
        assert shelves[0].image(one.index) == shelves[1].image(other.index)
    layout = shelves[0].layout
    assert layout.entry("model.norm.running_mean").shape == (16,)
    assert layout.entry("optimizer.state.model.first.weight.exp_avg").shape == (16, 8)
    extras = unpack_extras(layout.get_extras(memoryview(shelves[0].image(held[0][0].index))))
    assert extras["step"] == 6
    assert (extras["data"]["epoch"], extras["data"]["offset"]) == (0, 144)
    assert [len(agent.messages(channel.Describe)) for agent in site.agents] == [2, 2]


def test_the_last_state_is_wanted_on_disk_by_one_rank_of_each_node(site: Site) -> None:
    site.start(4, nodes=2, max_steps=3).results()
    for agent in site.agents:
        ((_, sealed),) = agent.await_(channel.Sealed)
        assert (sealed.generation, sealed.step, sealed.persist) == (5, 3, True)
        assert agent.valid()[0].index == sealed.index


def test_a_stop_by_one_agent_stops_all_at_one_step_whose_state_is_kept(site: Site) -> None:
    ranks = site.start(4, nodes=2, max_steps=1000, step_seconds=0.05)
    ranks.await_line(lambda line: line.get("step") == 4)
    site.agents[1].tell(0, flag="stop", seconds=20.0)
    assert ranks.codes() == [EXIT_STOPPED] * 4, ranks.story()
    stopped = [message for agent in site.agents for _, message in agent.await_(channel.Stopped, 2)]
    (step,) = {message.step for message in stopped}
    assert {message.saved for message in stopped} == {True}
    assert "the test wants it" in {message.reason for message in stopped}
    assert {agent.valid()[0].order for agent in site.agents} == {(5, step)}
    assert {ranks.lines(rank)[-1]["step"] for rank in range(4)} == {step}
    assert not site.agents[0].messages(channel.Sealed)


def test_a_stop_in_an_evaluation_is_heard_too(site: Site) -> None:
    ranks = site.start(2, max_steps=1000, poll_after=3)
    for rank in range(2):
        ranks.await_line(lambda line: "polling" in line, rank)
    site.agents[0].tell(1, flag="stop", seconds=20.0)
    assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    assert site.agents[0].valid()[0].order == (5, 3)


def test_a_checkpoint_is_sealed_once_on_each_node_and_training_goes_on(site: Site) -> None:
    ranks = site.start(4, nodes=2, max_steps=STEPS, step_seconds=0.05)
    ranks.await_line(lambda line: line.get("step") == 4)
    site.agents[0].tell(1, flag="checkpoint")
    assert [result["step"] for result in ranks.results()] == [STEPS] * 4
    sealed = [[message.step for _, message in agent.await_(channel.Sealed, 2)] for agent in site.agents]
    assert sealed[0] == sealed[1]
    asked, last = sealed[0]
    assert 4 <= asked <= 7
    assert last == STEPS


def test_a_stop_waits_for_buffers_that_are_not_there_yet_and_training_does_not(site: Site) -> None:
    ranks = site.start(2, max_steps=1000, step_seconds=0.05, options={"holds_back": True})
    ranks.await_line(lambda line: line.get("step") == 6)
    site.agents[0].tell(0, flag="checkpoint")  # cannot be served yet, and is not forgotten
    ranks.await_line(lambda line: line.get("step") == 9)
    assert not site.agents[0].messages(channel.Sealed)
    site.agents[0].tell(0, flag="stop", seconds=30.0)
    ranks.processes[0].join(0.5)
    assert ranks.processes[0].is_alive()
    site.agents[0].release()
    assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    stopped = [message for _, message in site.agents[0].await_(channel.Stopped, 2)]
    assert [message.saved for message in stopped] == [True, True]
    assert site.agents[0].valid()[0].order == (5, stopped[0].step)
    ((_, sealed),) = site.agents[0].messages(channel.Sealed)
    assert sealed.step == stopped[0].step


def test_no_rank_snapshots_before_all_of_its_node_can(site: Site) -> None:
    """Else a buffer would wait for ever for the share of the one that could not."""
    ranks = site.start(2, max_steps=40, step_seconds=0.05, options={"holds_back": [1], "settings": {"snapshot_every": 1}})
    ranks.await_line(lambda line: line.get("step") == 8)
    shelf = site.agents[0].shelf
    assert shelf is not None
    assert all(shelf.board._page[shelf.board._at(index)] == EMPTY for index in range(3))
    site.agents[0].release()
    ranks.results()
    assert [held.order for held in site.agents[0].valid()] == [(5, 40), (5, 39), (5, 38)]


def test_a_node_that_can_lend_none_says_so_and_its_workers_train_and_stop_unsaved(site: Site) -> None:
    ranks = site.start(2, nodes=1, max_steps=1000, step_seconds=0.05, options={"count": 0})
    ranks.await_line(lambda line: line.get("step") == 4)
    site.agents[0].tell(0, flag="stop", seconds=30.0)
    assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    assert [message.saved for _, message in site.agents[0].await_(channel.Stopped, 2)] == [False, False]


def test_a_world_begins_with_the_state_that_its_agent_has(site: Site, tmp_path: Path) -> None:
    """Four ranks stop, two go on under another generation, bit for bit as two that never stopped would."""
    whole = run(programs.train, 2, tmp_path / "whole", max_steps=STEPS, microbatch=12)
    ranks = site.start(2, max_steps=8, microbatch=12)
    ranks.results()
    shelf, held = site.agents[0].shelf, site.agents[0].valid()[0]
    assert shelf is not None
    shelf.board.retag(held.index, 6)
    again = site.start(2, max_steps=STEPS, microbatch=12, options={"resume": (shelf, held), "generation": 6}).results()
    assert again[0]["digest"] == whole[0]["digest"]
    assert list(again[0]["losses"]) == [str(step) for step in range(9, STEPS + 1)]
    restored = [message for _, message in site.agents[0].await_(channel.Restored, 2)]
    assert {message.step for message in restored} == {8}
    assert len({message.digest for message in restored}) == 1
    assert site.agents[0].valid()[0].order == (6, STEPS)


def test_a_stop_before_the_first_new_step_loses_nothing(site: Site) -> None:
    site.start(2, max_steps=8).results()
    shelf, held = site.agents[0].shelf, site.agents[0].valid()[0]
    assert shelf is not None
    ranks = site.start(2, program="wait_before_the_first_step", options={"resume": (shelf, held), "generation": 6})
    for rank in range(2):
        ranks.await_line(lambda line: "polling" in line, rank)
    site.agents[0].tell(0, flag="stop", seconds=30.0)
    assert ranks.codes() == [EXIT_STOPPED] * 2, ranks.story()
    assert [(message.step, message.saved) for _, message in site.agents[0].await_(channel.Stopped, 2)] == [(8, True), (8, True)]


def test_a_rank_with_other_data_tells_its_agent_and_ends(site: Site) -> None:
    ranks = site.start(3, nodes=3, program="plain", max_steps=3, odd=2)
    assert ranks.codes()[2] == 1, ranks.story()
    ((_, unfit),) = site.agents[2].await_(channel.Unfit)
    assert unfit.part == "data"
    assert "rank 2 has another" in unfit.detail
    assert not site.agents[0].messages(channel.Unfit)


def test_a_layout_that_changes_gets_buffers_of_its_own(site: Site) -> None:
    """A parameter that is thawed in the middle has moments from then on."""
    site.start(2, program="thaw", options={"settings": {"snapshot_every": 1}}).results()
    layouts = [Layout.parse(message.header) for _, message in site.agents[0].await_(channel.Describe, 4)]
    assert layouts[0] == layouts[1]
    assert layouts[2] == layouts[3]
    assert layouts[0].difference(layouts[2]) == "optimizer.state.model.last.bias.exp_avg is there, which nobody registered"
    assert site.agents[0].valid()[0].order == (5, 12)


def test_an_agent_that_hangs_up_is_an_error_and_no_hang(site: Site) -> None:
    ranks = site.start(1, max_steps=1000, step_seconds=0.05)
    ranks.await_line(lambda line: line.get("step") == 3)
    site.agents[0]._socks[0].shutdown(2)
    assert ranks.codes() == [1]
    assert "ChannelError" in ranks.story()


def test_sigterm_ends_a_worker_that_waits_for_its_agent(site: Site) -> None:
    ranks = site.start(1, program="never_welcome")
    ranks.await_line(lambda line: "waiting" in line)
    ranks.send(0, signal.SIGTERM)
    assert ranks.codes(within=10) == [-signal.SIGTERM]


def test_a_variable_that_names_no_socket_is_an_error() -> None:
    for text in ("seven", "99999"):
        with pytest.raises(ChannelError, match=f"ELASTICD_CHANNEL_FD='{text}' is no socket"):
            inherited_socket({channel.FD_VARIABLE: text})
    assert inherited_socket({}) is None


def test_words_of_the_agent_that_make_no_sense_are_errors() -> None:
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel.send(theirs, channel.Welcome(generation=1, settings={}, resume=2, header="{}", size=0))
        with pytest.raises(ChannelError, match="speaks of a state in buffer 2, and sent 0 descriptors"):
            AgentKeeper(ours, rank=0, local_rank=0, local_world=1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel.send(theirs, channel.Welcome(generation=1, settings={}))
        keeper = AgentKeeper(ours, rank=0, local_rank=0, local_world=1)
        channel.send(theirs, channel.Stopped(step=1, saved=True, reason=""))
        with pytest.raises(ChannelError, match="sent a stopped message"):
            keeper.look()
        read, write = os.pipe()
        channel.send(theirs, channel.Buffers(count=1), [read])
        lent = keeper.lend(wait=1.0)
        assert lent is not None
        assert lent.buffers == ()  # a lone descriptor is no control page with buffers, and is closed
        os.close(read)
        with pytest.raises(BrokenPipeError):
            os.write(write, b"x")
        os.close(write)
