"""`GET /v1/jobs/{job}/logs`: what a job's workers and agents have written, on this node and on others.

Owns: what may be asked, which nodes are asked, and one answer out of their parts. Must not: read files (`joblogs`), or speak with nodes (`peering`).

Nothing is held open: whoever wants to follow asks again with the places of the answer before. A connection that waits for lines would take up one of
the few there are, and a thread, for each person who looks; and it would have to be begun anew all the same, after a minute or with another daemon.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from elasticd.daemon import joblogs
from elasticd.daemon.api.answers import Answer, Envelope, Time, envelope
from elasticd.daemon.api.bodies import JobName, NodeFilter
from elasticd.daemon.joblogs import PLACE_MOST, ROOM_LEAST, ROOM_MOST, TAIL_MOST, Wanted
from elasticd.daemon.peering import Question
from elasticd.errors import KVUnavailableError, NotRunningError, UsageError
from elasticd.rendezvous.keys import checked_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticd.daemon.board import Board
    from elasticd.daemon.cluster import ClusterReader
    from elasticd.daemon.config import DaemonConfig
    from elasticd.daemon.peering import Heard, Peer, Peers

READERS: Final = 6
"""Requests for logs, or for telemetry, that are worked on at one time: a disk or a node that hangs holds up these, and nothing else."""
_ROOM: Final = 2 * 1024 * 1024
"""Characters of all nodes' lines together."""

_AROUND: Final = 64 * 1024  # bytes of an answer besides its lines

_Number = Annotated[int | None, Query(ge=0, lt=2**53)]
Nodes = Annotated[Literal["all", "own"], Query(description="`own`: this node alone; it asks no other.")]


class LogLineAnswer(Answer):
    """One line. `at` is what the line itself says of its time."""

    rank: int | None = Field(ge=0)
    stream: Literal["stdout", "stderr", "agent"]
    generation: int | None = Field(ge=0)
    at: Time
    text: Annotated[str, Field(max_length=joblogs.LINE_MAX)]


class NodeLogsAnswer(Answer):
    """One node's part. With a `problem` it has none. `place`: where to go on; `more`: at once, there was no room for all."""

    name: str
    generation: int | None
    problem: str
    place: Annotated[str, Field(max_length=PLACE_MOST)]
    more: bool
    lines: tuple[LogLineAnswer, ...]


class LogsAnswer(Answer):
    """Lines of a job, node by node, and within a node file by file. `notes`: what is not shown, and why."""

    job: str
    node: str
    nodes: tuple[NodeLogsAnswer, ...]
    notes: tuple[str, ...]


def logs_router(config: DaemonConfig, board: Board, reader: ClusterReader, peers: Peers) -> APIRouter:
    """The path.

    Args:
        config: where logs are.
        board: this node.
        reader: knows which jobs there are.
        peers: other nodes.
    """
    router = APIRouter(prefix="/v1", tags=["reading"])
    limiter = CapacityLimiter(READERS)
    told: dict[int | str, dict[str, Any]] = {200: {"model": Envelope[LogsAnswer]}}

    @router.get("/jobs/{job}/logs", responses=told)
    async def logs(  # what can be asked for is that much
        job: JobName,
        generation: _Number = None,
        rank: _Number = None,
        stream: Annotated[Literal["stdout", "stderr", "agent"] | None, Query(description="Both of the workers' if none is named.")] = None,
        tail: Annotated[int, Query(ge=0, le=TAIL_MOST, description="Lines of each file, from a node that `after` does not name.")] = 100,
        since: Annotated[float, Query(ge=0, le=2**53, description="Seconds since the epoch, for lines that say when they were written.")] = 0.0,
        after: Annotated[str, Query(max_length=PLACE_MOST, description="NODE:PLACE,NODE:PLACE,... of an earlier answer.")] = "",
        follow: Annotated[bool, Query(description="The places will be asked for: a line that has not ended is left for then.")] = False,
        room: Annotated[int, Query(ge=ROOM_LEAST, le=ROOM_MOST, description="Characters that each node may tell.")] = ROOM_MOST,
        node: NodeFilter = None,
        nodes: Nodes = "all",
    ) -> Response:
        """What the workers wrote last, or since a place: newest generation unless one is named."""
        wanted = Wanted(generation=generation, rank=rank, stream=stream, tail=tail, since=since, follow=follow, room=room)
        asked = _Asked(config, board, reader, peers, job, wanted, _places(after))
        data = await to_thread.run_sync(lambda: asked.answer(node, own=nodes == "own"), limiter=limiter)
        return envelope("JobLogs", None, data)

    return router


class _Asked:
    """One request on its way."""

    def __init__(self, config: DaemonConfig, board: Board, reader: ClusterReader, peers: Peers, job: str, wanted: Wanted, places: Mapping[str, str]) -> None:
        self._config, self._board, self._reader, self._peers = config, board, reader, peers
        self._job, self._wanted, self._places = job, wanted, places

    def answer(self, node: str | None, *, own: bool) -> LogsAnswer:
        """Put it together."""
        name = self._board.node
        others = () if own or node == name else chosen(self._peers, node, self._board)
        if node is None:
            others = tuple(peer for peer in others if self._job in peer.jobs or peer.name in self._places)
        notes = [f"other nodes are not shown: {self._peers.unable}"] if others and self._peers.unable else []
        others = () if notes else others
        room = max(ROOM_LEAST, min(self._wanted.room, _ROOM // (len(others) + 1)))
        parts = [] if node not in (None, name) else [self._own(name, room)]
        parts += self._of_others(others, room)
        parts.sort(key=lambda part: str(part["name"]))
        joblogs.without_old(parts, self._wanted, tuple(self._places))
        if not own and not any(part["generation"] is not None or part["lines"] or part["problem"] for part in parts):
            self._check_job()
        return LogsAnswer.model_validate({"job": self._job, "node": name, "nodes": parts, "notes": notes})

    def _own(self, name: str, room: int) -> dict[str, Any]:
        wanted = replace(self._wanted, after=self._places.get(name, ""), room=room)
        try:
            part = joblogs.read_logs(self._config.paths.log_dir, self._job, name, wanted)
        except OSError as error:
            return {**joblogs.document(name, None, f"its files cannot be read: {error.strerror}"), "place": wanted.after}
        return joblogs.document(name, part)

    def _of_others(self, others: Sequence[Peer], room: int) -> list[dict[str, Any]]:
        wanted = self._wanted
        plain = {
            "nodes": "own",
            "generation": wanted.generation,
            "rank": wanted.rank,
            "stream": wanted.stream,
            "tail": wanted.tail,
            "since": wanted.since,
            "follow": str(wanted.follow).lower(),
            "room": room,
        }

        def query(peer: Peer) -> Mapping[str, str | int | float | None]:
            place = self._places.get(peer.name)
            return {**plain, "after": f"{peer.name}:{place}" if place else None}

        question = Question(path=f"/v1/jobs/{self._job}/logs", query=query, read=_own_part, most=4 * room + _AROUND)
        return [self._part(name, one) for name, one in self._peers.ask(others, question).items()]

    def _part(self, name: str, heard: Heard[NodeLogsAnswer]) -> dict[str, Any]:
        """What a node said, believed of itself alone."""
        if heard.answer is None:
            return {**joblogs.document(name, None, heard.problem), "place": self._places.get(name, "")}
        return {**heard.answer.model_dump(), "name": name}

    def _check_job(self) -> None:
        """Nobody has a line: is there such a job at all?"""
        if self._job in self._board.turn.allowed or self._board.turn.etcd_problem:
            return
        try:
            self._reader.job(self._job)
        except KVUnavailableError:
            return


def chosen(peers: Peers, node: str | None, board: Board) -> tuple[Peer, ...]:
    """The other nodes that are meant.

    Raises:
        NotRunningError: there is no such node.
        KVUnavailableError: nor can anybody say, without etcd.
    """
    others = peers.others()
    if node is None:
        return others
    checked_name("node", node)
    found = tuple(peer for peer in others if peer.name == node)
    if not found and board.turn.etcd_problem:
        raise KVUnavailableError(f"etcd is out of reach, and this daemon has not seen node {node!r} yet")
    if not found:
        raise NotRunningError(f"there is no daemon on a node {node!r}", remedy="see: elasticctl nodes")
    return found


def _own_part(body: bytes) -> NodeLogsAnswer:
    """Of another node's answer. Raises a ValueError if it is none."""
    (part,) = Envelope[LogsAnswer].model_validate_json(body).data.nodes
    return part


def _places(text: str) -> dict[str, str]:
    """`after`, taken apart.

    Raises:
        UsageError: it is none.
    """
    places = {}
    for one in text.split(",") if text else ():
        name, colon, place = one.partition(":")
        if not colon or not place:
            raise UsageError("after: this is not NODE:PLACE,NODE:PLACE,...")
        places[checked_name("node", name)] = place
    return places
