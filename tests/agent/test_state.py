"""What an agent does with its workers' states: kept over their death, written, committed, served, and begun with again.

The workers here are this process, which speaks their side of the channel and writes a few bytes for a model. The membership is a stand-in that
records commits and knows where the other agents' states are served.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.agent.config import AgentConfig
from elasticd.agent.state import StateKeeper
from elasticd.observability.report import SnapshotReport
from elasticd.rendezvous.desk import Assignment
from elasticd.rendezvous.keys import JobKeys
from elasticd.rendezvous.records import CheckpointRecord, GenerationMember, GenerationRecord, MemberRecord, ResumePoint, SnapshotRef
from tests.rendezvous.world import generation, member, mid
from tests.support.etcd import await_
from trainer import checkpoint
from trainer.settings import Settings
from trainer.wire import channel
from trainer.wire.board import Board
from trainer.wire.layout import Layout

pytestmark = pytest.mark.timeout(60)

LAYOUT = Layout.build([("model.w", "F32", (64, 64)), ("model.b", "F32", (64,))], extras=100)


def image_of(step: int) -> bytes:
    return random.Random(step).randbytes(LAYOUT.size)


class Membership:
    """In the member's place: takes commits, and knows the other agents."""

    def __init__(self) -> None:
        self.commits: list[CheckpointRecord] = []
        self.records: dict[str, MemberRecord] = {}

    @property
    def checkpoint(self) -> CheckpointRecord | None:
        return self.commits[-1] if self.commits else None

    def commit(self, record: CheckpointRecord) -> bool:
        self.commits.append(record)
        return True

    def lookup(self, node: str) -> MemberRecord | None:
        return self.records.get(node)


class Agent:
    """A node's keeper, and what was asked of the main thread."""

    def __init__(self, node: str, folder: Path, **settings: Any) -> None:
        self.node = node
        self.member = Membership()
        self.rung = 0
        self.config = AgentConfig(
            cluster="cluster",
            job="job",
            node=node,
            argv=("x",),
            cwd=folder,
            log_dir=folder,
            endpoints=("127.0.0.1:1",),
            max_nodes=4,
            desired=2,
            state_dir=folder,
        )
        self.keeper = StateKeeper(self.config, lambda: Settings(**{"checkpoint_every_s": 0.0, **settings}))
        self.keeper.attach(self.member)  # type: ignore[arg-type]  # a stand-in
        self.keeper.call(self._ring)

    def _ring(self) -> None:
        self.rung += 1

    @property
    def root(self) -> Path:
        return self.config.state_dir / "checkpoints" / "job" / self.node

    def known_to(self, *others: Agent) -> None:
        """The others find this one's states."""
        record = member(self.node, 1).record.model_copy(update={"address": "127.0.0.1", "state_port": self.keeper.port})
        for other in others:
            other.member.records[self.node] = record

    def begin(self, number: int, *nodes: str, resume: ResumePoint | None = None) -> None:
        names = nodes or (self.node,)
        members = tuple(GenerationMember(id=mid(name), address="127.0.0.1", slots=1, probe_port=5) for name in names)
        record: GenerationRecord = generation(number, names).record.model_copy(update={"members": members, "resume": resume})
        self.keeper.begin(Assignment(generation=record, node_rank=names.index(self.node), base_rank=0, store_socket=None, fresh_until=0.0))

    def refs(self) -> list[tuple[int, int]]:
        return [ref.order for ref in self.keeper.holdings()[0]]

    def newest(self) -> SnapshotRef:
        return self.keeper.holdings()[0][0]


class Worker:
    """The worker of local rank 0, which joins as `trainer` would."""

    def __init__(self, agent: Agent) -> None:
        self.sock = agent.keeper.open(0)
        self.sock.settimeout(20)
        self._inbox = channel.Inbox()
        self._messages: list[channel.Message] = []
        self.board: Board | None = None
        self.buffers: list[mmap.mmap] = []
        channel.send(self.sock, channel.Hello(rank=0, local_rank=0, pid=os.getpid()))

    def hear(self) -> channel.Message:
        while not self._messages:
            self._messages = channel.receive(self.sock, self._inbox)
        return self._messages.pop(0)

    def welcome(self) -> channel.Welcome:
        message = self.hear()
        assert isinstance(message, channel.Welcome)
        self._take(message)
        return message

    def describe(self, layout: Layout = LAYOUT) -> channel.Buffers:
        channel.send(self.sock, channel.Describe(header=layout.header_text, size=layout.size))
        message = self.hear()
        assert isinstance(message, channel.Buffers)
        self._take(message)
        return message

    def _take(self, message: channel.Message) -> None:
        if message.fds:
            self.board = Board.attach(message.fds[0])
            self.buffers = [mmap.mmap(fd, 0) for fd in message.fds[1:]]
            for fd in message.fds:
                os.close(fd)

    def snapshot(self, number: int, step: int, *, persist: bool = False, torn: bool = False) -> None:
        assert self.board
        index = self.board.begin(number, step)
        assert index is not None
        image = image_of(step)
        self.buffers[index][: len(image) // 2] = image[: len(image) // 2]
        if torn:
            return
        self.buffers[index][:] = image
        assert self.board.finish(index, number, step, 0)
        if persist:
            channel.send(self.sock, channel.Sealed(generation=number, step=step, index=index, persist=True))

    def trains(self, number: int, *steps: int, persist: bool = False) -> None:
        self.welcome()
        self.describe()
        for step in steps:
            self.snapshot(number, step, persist=persist and step == steps[-1])

    def state(self, welcome: channel.Welcome) -> bytes:
        return self.buffers[welcome.resume][:]

    def die(self) -> None:
        self.sock.close()
        for buffer in self.buffers:
            buffer.close()
        if self.board:
            self.board.close()


MakeAgent = Callable[..., Agent]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeAgent]:
    made: list[Agent] = []

    def agent(node: str = "a", **settings: Any) -> Agent:
        made.append(Agent(node, tmp_path, **settings))
        return made[-1]

    yield agent
    for one in made:
        one.keeper.close()


def resume_from(ref: SnapshotRef, *holders: str) -> ResumePoint:
    return ResumePoint(generation=ref.generation, step=ref.step, digest=ref.digest, holders=holders)


# --- in memory


def test_a_worker_that_begins_at_the_very_beginning_is_told_so(make: MakeAgent) -> None:
    agent = make(snapshot_every=7)
    agent.begin(1)
    worker = Worker(agent)
    welcome = worker.welcome()
    assert (welcome.generation, welcome.resume, welcome.step, welcome.fds) == (1, -1, 0, ())
    assert Settings(**welcome.settings).snapshot_every == 7
    worker.die()


def test_snapshots_outlive_the_worker_and_a_torn_one_never_counts(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, 2)
    worker.snapshot(1, 3, torn=True)
    worker.die()
    agent.keeper.gone()
    assert agent.refs() == [(1, 2), (1, 1)]
    assert agent.newest().digest == checkpoint.digest_image(LAYOUT.header, memoryview(image_of(2)))[0]


def test_the_next_worker_begins_with_the_state_that_the_generation_names_though_a_newer_one_is_here(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 4, 5)
    worker.die()
    agent.keeper.gone()
    older = agent.keeper.holdings()[0][1]
    agent.begin(2, resume=resume_from(older, "a"))
    worker = Worker(agent)
    welcome = worker.welcome()
    assert (welcome.generation, welcome.step, welcome.digest, welcome.header) == (2, 4, older.digest, LAYOUT.header_text)
    assert worker.state(welcome) == image_of(4)
    assert agent.refs() == [(2, 4)]  # as the new generation's; the other's future is no more (PROTOCOL 21)
    worker.snapshot(2, 5)
    assert agent.refs() == [(2, 5), (2, 4)]
    worker.die()


def test_a_worker_that_says_hello_before_its_state_is_here_waits_for_it(make: MakeAgent) -> None:
    giver, taker = make("a"), make("b")
    giver.known_to(taker)
    giver.begin(1)
    worker = Worker(giver)
    worker.trains(1, 9)
    worker.die()
    giver.keeper.gone()
    state = resume_from(giver.newest(), "a")
    taker.begin(2, "a", "b", resume=state)
    late = Worker(taker)
    welcome = late.welcome()
    assert late.state(welcome) == image_of(9)
    assert taker.refs() == [(2, 9)]
    late.die()


def test_a_leaver_stays_until_the_others_have_its_state(make: MakeAgent) -> None:
    giver, taker = make("a"), make("b")
    giver.known_to(taker)
    giver.begin(1)
    worker = Worker(giver)
    worker.trains(1, 9)
    worker.die()
    giver.keeper.gone()
    without = generation(2, ["b"]).record.model_copy(update={"resume": resume_from(giver.newest(), "a")})
    assert giver.keeper.owed(without)
    taker.begin(2, "b", resume=without.resume)
    other = Worker(taker)
    other.welcome()
    await_(lambda: not giver.keeper.owed(without), what="nothing owed any more")
    other.die()


def test_a_state_that_nobody_has_fails_the_generation_here_and_says_why(make: MakeAgent) -> None:
    agent = make()
    agent.begin(3, resume=ResumePoint(generation=2, step=8, digest="d" * 32, holders=("b",)))
    worker = Worker(agent)
    await_(lambda: agent.rung > 0, what="the main thread told")
    assert "step 8 of generation 2" in agent.keeper.failure
    assert "b is not here" in agent.keeper.failure
    assert agent.keeper.holdings()[1] == ()
    worker.die()


def test_a_layout_that_is_none_gets_no_buffers_and_harms_nobody(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.welcome()
    channel.send(worker.sock, channel.Describe(header="{}", size=1 << 40))
    answer = worker.hear()
    assert isinstance(answer, channel.Buffers)
    assert (answer.count, answer.fds) == (0, ())
    assert answer.why
    assert worker.describe().count == 3
    worker.die()


def test_another_model_gets_buffers_of_its_own_and_the_old_states_are_gone(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1)
    assert worker.describe(Layout.build([("other", "F32", (5,))], extras=10)).count == 3
    assert agent.refs() == []
    worker.die()


# --- on disk


def test_a_wanted_checkpoint_is_written_and_committed_by_the_only_node(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, 2, persist=True)
    await_(lambda: agent.member.commits, what="the commit")
    assert agent.keeper.settle(10)
    (record,) = agent.member.commits
    assert (record.generation, record.step, record.holders, record.shared) == (1, 2, ("a",), False)
    assert record.scope == JobKeys("cluster", "job").scope
    (found,) = checkpoint.scan(agent.root)
    manifest = checkpoint.verify(found.path)
    assert (manifest.digest, manifest.world) == (record.digest, {"nodes": 1, "world_size": 1})
    worker.die()


def test_a_state_that_was_written_already_is_not_written_again_when_the_job_ends(make: MakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, 2, persist=True)
    worker.die()
    agent.keeper.gone()
    assert agent.keeper.settle(10)
    agent.keeper.write_newest()
    assert agent.keeper.settle(10)
    assert capsys.readouterr().out.count("checkpoint_written") == 1
    assert len(agent.member.commits) == 1


def test_the_newest_snapshot_is_written_when_the_job_ends_though_nobody_asked_for_it(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, 2)
    worker.die()
    agent.keeper.gone()
    agent.keeper.write_newest()
    assert agent.keeper.settle(10)
    assert [(record.generation, record.step) for record in agent.member.commits] == [(1, 2)]


def test_two_nodes_write_and_the_first_commits_once_both_have(make: MakeAgent) -> None:
    first, second, third = make("a"), make("b"), make("c")
    first.known_to(second, third)
    workers = []
    for agent in (first, second, third):
        agent.begin(1, "a", "b", "c")
        workers.append(Worker(agent))
    for worker in (workers[0], workers[2]):
        worker.trains(1, 5, persist=True)
    await_(lambda: checkpoint.scan(first.root), what="the first one's checkpoint")
    assert not first.keeper.settle(0.3)
    assert first.member.commits == []
    workers[1].trains(1, 5, persist=True)
    await_(lambda: first.member.commits, what="the commit")
    assert first.member.commits[0].holders == ("a", "b")
    assert second.member.commits == []
    assert checkpoint.scan(third.root) == []
    for worker in workers:
        worker.die()


def test_a_new_agent_has_what_its_disk_has_and_begins_with_it(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 3, persist=True)
    worker.die()
    agent.keeper.gone()
    assert agent.keeper.settle(10)
    again = make()
    ref = again.newest()
    assert (ref.order, ref.digest) == ((1, 3), agent.member.commits[0].digest)
    again.begin(4, resume=resume_from(ref, "a"))
    worker = Worker(again)
    assert worker.state(worker.welcome()) == image_of(3)
    assert again.refs() == [(4, 3), (1, 3)]
    worker.die()


def test_the_last_state_is_written_as_the_active_generations_though_that_never_began_here(make: MakeAgent) -> None:
    """Its node leaves, no generation follows, and only its memory holds it (PROTOCOL 29)."""
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 4, 5)
    worker.die()
    agent.keeper.gone()
    newest = agent.newest()
    active = generation(2, ["a"]).record.model_copy(update={"resume": resume_from(newest, "a")})
    assert agent.keeper.keep_last(active, 10)
    (record,) = agent.member.commits
    assert (record.generation, record.step, record.digest, record.holders) == (2, 5, newest.digest, ("a",))
    (found,) = checkpoint.scan(agent.root)
    assert checkpoint.verify(found.path).digest == newest.digest
    assert agent.keeper.keep_last(active, 10)
    assert len(agent.member.commits) == 1, "once is enough"


def test_two_that_leave_a_generation_that_never_began_commit_its_state_together(make: MakeAgent) -> None:
    """The second had yet to fetch it."""
    first, second = make("a"), make("b")
    for one, other in ((first, second), (second, first)):
        one.known_to(other)
    first.begin(1)
    worker = Worker(first)
    worker.trains(1, 7)
    worker.die()
    first.keeper.gone()
    newest = first.newest()
    active = generation(2, ["a", "b"]).record.model_copy(update={"resume": resume_from(newest, "a")})
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(first.keeper.keep_last(active, 20)))
    thread.start()
    assert second.keeper.keep_last(active, 20)
    thread.join()
    assert told == [True]
    assert [(record.order, record.digest, record.holders) for record in first.member.commits] == [((2, 7), newest.digest, ("a", "b"))]
    assert second.member.commits == []


def test_who_leaves_alone_waits_for_no_second_disk(make: MakeAgent) -> None:
    """It is written, and not committed: the other node is gone (PROTOCOL 24)."""
    agent = make()
    agent.begin(1, "a", "b")
    worker = Worker(agent)
    worker.trains(1, 4)
    worker.die()
    agent.keeper.gone()
    active = generation(1, ["a", "b"]).record
    assert agent.keeper.keep_last(active, 30)
    assert agent.member.commits == []
    assert [found.step for found in checkpoint.scan(agent.root)] == [4]


def test_a_damaged_checkpoint_is_set_aside_declared_lost_and_never_begun_with(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 3, persist=True)
    worker.die()
    agent.keeper.gone()
    assert agent.keeper.settle(10)
    (found,) = checkpoint.scan(agent.root)
    with (found.path / "state.safetensors").open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))
    again = make()
    ref = again.newest()
    again.begin(4, resume=resume_from(ref, "a"))
    await_(lambda: again.keeper.failure, what="the failure")
    assert again.keeper.holdings() == ((), (ref.digest,))
    assert [path.suffix for path in agent.root.iterdir()] == [".bad"]


def test_a_peer_gives_from_its_disk_what_is_no_longer_in_its_memory(make: MakeAgent) -> None:
    agent = make("a")
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 3, persist=True)
    worker.die()
    agent.keeper.gone()
    assert agent.keeper.settle(10)
    fresh, taker = make("a"), make("b")
    fresh.known_to(taker)
    taker.begin(2, "b", resume=resume_from(fresh.newest(), "a"))
    other = Worker(taker)
    assert other.state(other.welcome()) == image_of(3)
    other.die()


def test_a_job_outlives_all_of_its_machines_where_copies_are_kept_elsewhere(make: MakeAgent, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'storage'}"
    agent = make("a", checkpoint_url=url)
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 3, persist=True)
    await_(lambda: checkpoint.list_remote(f"{url}/job"), what="the copy")
    worker.die()
    fresh = make("z", checkpoint_url=url)
    fresh.keeper.recall()
    assert fresh.refs() == [(1, 3)]


# --- what is reported


def test_a_report_on_checkpoints_and_snapshots_says_what_there_is(make: MakeAgent) -> None:
    agent = make(checkpoint_every_s=600.0)
    assert agent.keeper.snapshots.buffers == 0
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, 2, persist=True)
    await_(lambda: agent.member.commits, what="the commit")
    assert agent.keeper.settle(10)
    worker.snapshot(1, 3)
    report = agent.keeper.checkpoints
    assert (report.written, report.failed, report.step, report.committed_step, report.every_s) == (1, 0, 2, 2, 600.0)
    assert (report.nbytes, sum(report.durations.counts)) == (LAYOUT.size, 1)
    assert agent.keeper.snapshots == SnapshotReport(step=3, buffers=3, on_disk=False)
    assert (agent.keeper.newest(1), agent.keeper.newest(2)) == (3, 0)
    assert agent.keeper.trouble == ""
    worker.die()


def test_a_full_disk_raises_the_failures_and_is_named(make: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        worker.trains(1, 1, persist=True)
        await_(lambda: agent.keeper.checkpoints.failed, what="a failed checkpoint")
        assert agent.keeper.trouble.startswith("checkpoints are not written: ")
        assert "no space left" in agent.keeper.trouble
    await_(lambda: agent.member.commits, what="the commit, once there is space")
    assert (agent.keeper.checkpoints.written, agent.keeper.trouble) == (1, "")
    worker.die()


def test_a_new_agent_reports_the_checkpoint_that_it_found(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 3, persist=True)
    await_(lambda: agent.member.commits, what="the commit")
    worker.die()
    again = make()
    again.keeper.recall()
    report = again.keeper.checkpoints
    assert (report.written, report.step, report.nbytes, report.committed_step) == (0, 3, LAYOUT.size, 0)
    assert report.at == pytest.approx(agent.keeper.checkpoints.at, abs=5)


def test_words_about_steps_are_for_the_listener_and_answered_by_nobody(tmp_path: Path) -> None:
    heard: list[channel.Message] = []

    class Listening:
        def heard(self, local_rank: int, message: channel.Message) -> None:
            assert local_rank == 0
            heard.append(message)

    agent = Agent("a", tmp_path)
    agent.keeper.close()
    agent.keeper = StateKeeper(agent.config, Settings, Listening())
    agent.begin(1)
    worker = Worker(agent)
    worker.welcome()
    channel.send(worker.sock, channel.Telemetry(window={"odd": 1}))
    channel.send(worker.sock, channel.Ranks(step=1, steps=1, columns={}))
    await_(lambda: len(heard) == 3, what="three messages")
    assert [message.kind for message in heard] == ["hello", "telemetry", "ranks"]
    worker.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        worker.hear()
    worker.die()
    agent.keeper.close()


# --- asking, and being told


def test_only_workers_that_listen_are_asked(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    silent = agent.keeper.open(1)
    worker = Worker(agent)
    worker.welcome()
    assert agent.keeper.listening == (0,)
    assert agent.keeper.ask_stop("node d joins", 30.0) == (0,)
    assert worker.hear() == channel.Raise(flag="stop", reason="node d joins", seconds=30.0)
    assert agent.keeper.ask_checkpoint("asked for") == (0,)
    assert worker.hear() == channel.Raise(flag="checkpoint", reason="asked for")
    channel.send(worker.sock, channel.Stopped(step=5, saved=True, reason="node d joins"))
    await_(lambda: agent.keeper.stopped_as_asked(0), what="its last word")
    assert not agent.keeper.stopped_as_asked(1)
    silent.close()
    worker.die()


def test_a_checkpoint_that_is_asked_for_while_workers_start_is_asked_of_the_first_that_speaks(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1)
    assert agent.keeper.ask_checkpoint("asked for", owed=True) == ()
    worker = Worker(agent)
    worker.welcome()
    assert worker.hear() == channel.Raise(flag="checkpoint", reason="asked for")
    worker.die()
    agent.begin(2)
    worker = Worker(agent)
    worker.welcome()
    assert agent.keeper.ask_stop("node d joins", 30.0) == (0,)
    assert worker.hear() == channel.Raise(flag="stop", reason="node d joins", seconds=30.0), "once, and not in the next generation"
    worker.die()


def test_the_first_node_asks_for_checkpoints_by_the_clock_and_the_others_do_not(make: MakeAgent) -> None:
    first, second = make("a", checkpoint_every_s=0.5), make("b", checkpoint_every_s=0.5)
    workers = []
    for agent in (first, second):
        agent.begin(1, "a", "b")
        workers.append(Worker(agent))
        workers[-1].welcome()
    assert workers[0].hear() == channel.Raise(flag="checkpoint", reason="the interval has passed")
    workers[1].sock.settimeout(2)
    with pytest.raises(TimeoutError):
        workers[1].hear()
    for worker in workers:
        worker.die()


def test_a_worker_that_finds_its_node_unfit_names_the_difference(make: MakeAgent) -> None:
    agent = make()
    agent.begin(1, "b", "a")
    worker = Worker(agent)
    worker.welcome()
    channel.send(worker.sock, channel.Unfit(part="data", detail="1,796 samples here, 1,797 on rank 0"))
    await_(lambda: agent.rung > 0, what="the main thread told")
    assert agent.keeper.difference == "data: 1,796 samples here, 1,797 on rank 0"
    assert agent.keeper.failure == ""
    worker.die()


def test_settings_are_read_anew_for_each_generation(tmp_path: Path) -> None:
    values = {"snapshot_every": 1, "checkpoint_every_s": 0.0}
    agent = Agent("a", tmp_path)
    agent.keeper.close()
    config = agent.config
    keeper = StateKeeper(config, lambda: Settings(**values))
    agent.keeper = keeper
    agent.begin(1)
    worker = Worker(agent)
    assert worker.welcome().settings["snapshot_every"] == 1
    worker.die()
    values["snapshot_every"] = 5
    agent.begin(2)
    worker = Worker(agent)
    assert worker.welcome().settings["snapshot_every"] == 5
    worker.die()
    keeper.close()


def test_a_closed_keeper_leaves_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    before, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    agent = Agent("a", tmp_path)
    agent.begin(1)
    worker = Worker(agent)
    worker.trains(1, 1, persist=True)
    worker.die()
    agent.keeper.gone()
    agent.keeper.settle(10)
    agent.keeper.close()
    await_(lambda: threading.active_count() <= threads, what="the end of its threads")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", agent.keeper.port), timeout=2)
