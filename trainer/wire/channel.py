"""Messages between a worker and its agent, over a socket pair that the worker inherits (its number is in ELASTICD_CHANNEL_FD).

Owns: the messages, their framing, and refusing what does not fit. Must not: act on a message, or import torch.

On the wire: four bytes of length, big endian, then one JSON object whose "kind" names its class. File descriptors travel with the first byte
of the message that speaks of them (SCM_RIGHTS). Neither side executes, unpickles or opens anything that it was told of.

::

    worker                               agent
      Hello            ─────────────────►         who I am
                       ◄─────────────────  Welcome     generation, settings, state to begin with; descriptors: control page, buffers
      Restored         ─────────────────►         that state is loaded, this is its hash
      Describe         ─────────────────►         the layout of the state, once the optimizer has one
                       ◄─────────────────  Buffers     descriptors: control page, buffers; or why there are none
                       ◄─────────────────  Raise       stop, or write a checkpoint, at a step that all ranks agree on
      Sealed           ─────────────────►         a snapshot that somebody waits for is whole
      Stopped          ─────────────────►         nothing more will come; the process ends
      Unfit            ─────────────────►         this node differs from the others in this and cannot take part
      Telemetry        ─────────────────►         about once a second: what this rank's steps came to
      Ranks            ─────────────────►         now and then, from rank 0: the same of all ranks side by side
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final, TypeVar

from trainer.errors import ChannelError

FD_VARIABLE: Final = "ELASTICD_CHANNEL_FD"
VERSION: Final = 1
MAX_BYTES: Final = 64 * 1024 * 1024
"""Largest message believed: a layout of half a million tensors."""
MAX_FDS: Final = 8
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Base of all. `fds` are the descriptors that came with it; the receiver owns them."""

    kind: ClassVar[str] = ""
    fds: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """A worker's first word."""

    kind: ClassVar[str] = "hello"
    version: int = VERSION
    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(Message):
    """The agent's answer, once the state to begin with lies in a buffer (which may take a while).

    Attributes:
        generation: the number that snapshots are to bear.
        settings: values of `trainer.settings.Settings` as this node has them.
        resume: index of the buffer to begin with, -1 to begin at the very beginning.
        step: of that state.
        header: its layout (`wire.layout`), as text.
        size: of its image, in bytes.
        digest: of its content.
        directory: where this node's checkpoints lie, "" if nowhere.
        skip: steps whose data are left out before the first: they led to a divergence, from which the job went back.
    """

    kind: ClassVar[str] = "welcome"
    generation: int
    settings: dict[str, Any]
    resume: int = -1
    step: int = 0
    header: str = ""
    size: int = 0
    digest: str = ""
    directory: str = ""
    skip: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(Message):
    """The worker begins at `step`, its state hashes to `digest` as all ranks' does."""

    kind: ClassVar[str] = "restored"
    step: int
    digest: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Describe(Message):
    """The layout that snapshots will have. All local ranks send the same; the first one counts."""

    kind: ClassVar[str] = "describe"
    header: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers(Message):
    """Descriptors of the control page and of `count` buffers, in this order.

    Attributes:
        where: "memory", or "disk" if they did not fit into memory.
        why: one line if there are fewer than three, or they are on disk, or none.
    """

    kind: ClassVar[str] = "buffers"
    count: int
    where: str = "memory"
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Raise(Message):
    """Raise the flag that all ranks agree on.

    Attributes:
        flag: "checkpoint": go on, and have a snapshot written to disk; "stop": take a snapshot, then end.
        reason: for people.
        seconds: after which the agent will not wait any longer.
    """

    kind: ClassVar[str] = "raise"
    flag: str
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed(Message):
    """The local rank that wrote last says so, if `persist`: the agent is to write it to disk."""

    kind: ClassVar[str] = "sealed"
    generation: int
    step: int
    index: int
    persist: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped(Message):
    """The worker stops at `step`; `saved`: with a snapshot of it."""

    kind: ClassVar[str] = "stopped"
    step: int
    saved: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit(Message):
    """This node differs from rank 0's in `part` (data, code, config, state): `detail` names the difference."""

    kind: ClassVar[str] = "unfit"
    part: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry(Message):
    """A `wire.window.Window`, as a dict."""

    kind: ClassVar[str] = "telemetry"
    window: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks(Message):
    """What all ranks' steps came to since the last such message, gathered to rank 0 through the process group.

    Attributes:
        step: up to which.
        steps: how many.
        columns: name -> one number for each rank: mean seconds a step of each of `wire.window.PHASES`, and "seconds" of the whole step.
    """

    kind: ClassVar[str] = "ranks"
    step: int
    steps: int
    columns: dict[str, Any]


M = TypeVar("M", bound=Message)
_KINDS: Final[dict[str, type[Message]]] = {
    cls.kind: cls for cls in (Hello, Welcome, Restored, Describe, Buffers, Raise, Sealed, Stopped, Unfit, Telemetry, Ranks)
}


def encode(message: Message) -> bytes:
    """A message as it goes over the wire, length first, without its descriptors."""
    values = asdict(message)
    del values["fds"]
    body = json.dumps({"kind": message.kind, **values}, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_BYTES:
        raise ChannelError(f"a {message.kind} message of {len(body)} bytes is longer than the {MAX_BYTES} allowed")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes, fds: Sequence[int] = ()) -> Message:
    """Read a message, its length taken off.

    Raises:
        ChannelError: not JSON, of no known kind, or a value is missing, unknown or of another type.
    """
    try:
        values = json.loads(body)
        cls = _KINDS[values.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ChannelError(f"a message that is none: {body[:80]!r}") from None
    known = {item.name: item for item in fields(cls) if item.name != "fds"}
    for name, value in values.items():
        if name not in known or not _fits(known[name].type, value):
            raise ChannelError(f"a {cls.kind} message with {name} = {value!r:.80}")
    try:
        return cls(fds=tuple(fds), **values)
    except TypeError:
        missing = sorted(known.keys() - values.keys())
        raise ChannelError(f"a {cls.kind} message that lacks one of {', '.join(missing)}") from None


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
}


def _fits(wanted: object, value: object) -> bool:
    types = _TYPES[str(wanted)]
    return isinstance(value, types) and (isinstance(value, bool) is (types == (bool,)))


class Inbox:
    """Puts a stream of bytes and descriptors together into messages.

    Descriptors arrive with the first byte of their message, so those taken in while a message begins are its own. Only `Welcome` and `Buffers`
    carry any, and each is an answer: there is never a second one in flight.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Message]:
        """Take in what was received; return the messages that are whole now.

        Raises:
            ChannelError: as `decode`; or a message longer than any may be.
        """
        self._bytes += data
        self._fds += fds
        messages: list[Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_BYTES:
                raise ChannelError(f"a message of {length} bytes is longer than the {MAX_BYTES} allowed")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            body = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            cls = _kind_of(body)
            taken: list[int] = []
            if cls in (Welcome, Buffers):
                taken, self._fds = self._fds, []
            messages.append(decode(body, taken))
        return messages


def _kind_of(body: bytes) -> type[Message] | None:
    for kind, cls in _KINDS.items():
        if body.startswith(b'{"kind":"' + kind.encode() + b'"'):
            return cls
    return None


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message whole; blocks as long as the socket does.

    Raises:
        ChannelError: the other side is gone.
    """
    data = encode(message)
    try:
        sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
        if sent < len(data):
            sock.sendall(data[sent:])
    except OSError as error:
        raise ChannelError(f"cannot send {message.kind}: {error.strerror or error}") from None


def receive(sock: socket.socket, inbox: Inbox, *, max_fds: int = MAX_FDS) -> list[Message]:
    """Wait for something to arrive; the messages that are whole now, perhaps none.

    `max_fds` = 0 takes no descriptors: an agent is sent none, and must not be filled up with them.

    Raises:
        ChannelError: the other side is gone, or as `Inbox.feed`.
        TimeoutError, BlockingIOError: as the socket is set.
    """
    try:
        if max_fds:
            data, fds, _flags, _address = socket.recv_fds(sock, 256 * 1024, max_fds)
        else:
            data, fds = sock.recv(256 * 1024), []
    except (BlockingIOError, TimeoutError, InterruptedError):
        raise
    except OSError as error:
        raise ChannelError(f"cannot receive: {error.strerror or error}") from None
    if not data:
        raise ChannelError("the other side has hung up")
    return inbox.feed(data, fds)
