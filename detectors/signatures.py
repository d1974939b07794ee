"""What single lines of logs mean: a table of known messages, and what is told of those that come.

Owns: the table's form, matching, the verdict on a whole log. Must not: read logs, or decide what is done.

A line goes through two sieves: cues, texts of which most lines hold none, and the regexes of the signatures whose cue is there, the specific before the
generic. All cues are looked for at once, and what came of it is remembered by the line without its digits, since most lines of a log differ from one
before by numbers alone. The table is data, `signatures.toml` and `xid.toml`; a site's own files change it by id.

    table = Table.load(Path("/etc/site/signatures.toml"))
    signatures = Signatures(table)
    for line in lines:
        finding = signatures.see(line)
"""

from __future__ import annotations

import re
import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from detectors.findings import Certainty, Class, Feature, Finding, Role
from detectors.observations import Line, Stream

TEXT_MAX: Final = 1024
"""Characters of a line that are looked at."""
EXCEPTION_LINES_MAX: Final = 200
"""Lines of an event's `exception` that are looked at."""
EVERY: Final = 60.0
"""Seconds in which the same signature of the same rank is told once."""
SEEN_MAX: Final = 4096
"""Lines, without their digits, of which is remembered which signatures are likely; beyond that all are forgotten."""
REMEMBERED_MAX: Final = 4096
"""Signatures of ranks whose last telling is remembered; beyond that the oldest is forgotten, and may be told early."""

_GENERIC: Final = 1  # up to this specificity a message says only that something was raised
_EXCEPTION: Final = 2  # up to this one it is the type of an exception that says what happened
_KEYS: Final = frozenset({"id", "cues", "regex", "exceptions", "class", "role", "scope", "certainty", "specificity", "summary", "label", "kernel", "disabled"})
_SCOPES: Final = ("rank", "node", "job")
_RAISED: Final = r'(?:^|[-\d\]>|:=)"\']\s?)(?:[A-Za-z_]\w{0,40}\.){0,8}(?:%s)(?:: |\s*$)'  # at the start, or after what a logger or a launcher puts before
_PREFIX: Final = r"^\s{0,8}(?:\[?\w{0,16}\]?:\s{0,4})?"
_RUNAWAY: Final = re.compile(r"(?<!\\)\)(?:[*+]|\{\d*,\})")  # a group repeated without a bound: what makes a regex take for ever
_CHAINED: Final = "above exception"  # "During handling of the above exception, …", "The above exception was the direct cause of …"


class TableError(ValueError):
    """A file of signatures cannot be used; the message names the file, the entry, the key and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A message that is known.

    Attributes:
        id: a name that stays; "xid_79" for a number of NVIDIA's driver.
        cues: texts of which one must be in the line.
        pattern: what must be found then; None where a cue is enough.
        specificity: 3 one message, 2 an exception that means one thing, 1 RuntimeError, 0 any other exception.
        label: the mode of failure in the words of the gpualert-eval corpus, "" where none fits.
        kernel: counts only where the kernel says it.
    """

    id: str
    cues: tuple[str, ...]
    pattern: re.Pattern[str] | None
    cls: Class
    summary: str
    role: Role = Role.ROOT
    scope: str = "rank"
    certainty: Certainty = Certainty.CERTAIN
    specificity: int = 3
    label: str = ""
    kernel: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a whole log comes to.

    Attributes:
        signature: the root; where there is none, the first that confirms one; where there is none either, the first cascade, whose root is in another log.
        line: that it rests on.
    """

    signature: Signature
    line: str


class Table:
    """Signatures, in the order in which they are tried; made by `load`.

    Attributes:
        version: of the built-in table.
        signatures: all that are in use.
    """

    def __init__(self, signatures: Iterable[Signature], *, advice: Sequence[str] = (), version: int = 0) -> None:
        self.version = version
        self.signatures = tuple(sorted(signatures, key=lambda signature: -signature.specificity))
        cues: dict[bytes, set[int]] = {}
        for index, signature in enumerate(self.signatures):
            for cue in signature.cues:
                cues.setdefault(_bare(cue), set()).add(index)
        self._cues = tuple((cue, frozenset(indexes)) for cue, indexes in cues.items())
        self._any_cue = re.compile(_either(cues)) if cues else None
        self._advice = re.compile(_PREFIX + f"(?:{'|'.join(map(re.escape, advice))})") if advice else None
        self._seen: dict[bytes, tuple[int, ...]] = {}

    @classmethod
    def load(cls, *paths: Path) -> Self:
        """The built-in table, changed by files in the order given.

        Raises:
            TableError: a file cannot be read, or an entry is not as it must be.
        """
        package = files("detectors")
        entries: dict[str, dict[str, Any]] = {}
        head: dict[str, Any] = {}
        for name in ("xid.toml", "signatures.toml"):
            document = tomllib.loads((package / name).read_text(encoding="utf-8"))
            head |= {key: value for key, value in document.items() if key in {"advice", "version"}}
            _merge(entries, document, name)
        for path in paths:
            try:
                document = tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise TableError(f"{path}: {error}") from error
            _merge(entries, document, str(path))
        signatures = [_parse(entry) for entry in entries.values() if not entry.get("disabled")]
        return cls(signatures, advice=head["advice"], version=head["version"])

    def match(self, line: Line) -> Signature | None:
        """What a line is, if it is known; None for all others, which are most."""
        found = self.find(line.text, kernel=line.stream is Stream.KERNEL)
        if line.stream is not Stream.EVENT:
            return found
        if found and found.specificity > _EXCEPTION:
            return found
        if raised := self._raised(line):
            return raised
        # What is told in passing of an exception that somebody dealt with is no failure.
        return None if found and found.specificity <= _GENERIC and line.level in {"debug", "info"} else found

    def find(self, text: str, *, kernel: bool = True) -> Signature | None:
        """The signature of a text, the most specific one that matches.

        Args:
            text: one line.
            kernel: whether the kernel may have said it.
        """
        if len(text) > TEXT_MAX:
            text = text[:TEXT_MAX]
        bare = _bare(text)
        likely = self._seen.get(bare)
        if likely is None:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            likely = self._seen[bare] = self._likely(bare)
        return self._first(text, likely, kernel=kernel) if likely else None

    def _likely(self, bare: bytes) -> tuple[int, ...]:
        """Which signatures have a cue in a line, as far as can be told without its digits."""
        if self._any_cue is None or not self._any_cue.search(bare):
            return ()
        return tuple(sorted({index for cue, indexes in self._cues if cue in bare for index in indexes}))

    def _first(self, text: str, likely: tuple[int, ...], *, kernel: bool) -> Signature | None:
        if self._advice and self._advice.match(text):
            return None
        for index in likely:
            signature = self.signatures[index]
            if signature.kernel and not kernel:
                continue
            if any(map(text.__contains__, signature.cues)) and (signature.pattern is None or signature.pattern.search(text)):
                return signature
        return None

    def classify(self, lines: Iterable[str]) -> Verdict | None:
        """What a whole log comes to: the earliest of its most specific roots; see `Verdict` for logs without one. None: nothing is known in it."""
        best: Verdict | None = None
        rank = (-1, -1)
        for text, signature, outer in self._told(lines):
            role = Role.CASCADE if outer else signature.role
            if role is Role.ADVISE:
                continue
            here = (_WEIGHT[role], signature.specificity)
            if here > rank:
                best, rank = Verdict(signature=signature, line=text[:TEXT_MAX]), here
        return best

    def _told(self, lines: Iterable[str]) -> Iterator[tuple[str, Signature, bool]]:
        chained = False
        for text in lines:
            if signature := self.find(text):
                outer = chained and signature.specificity <= _EXCEPTION
                chained = chained and not outer
                yield text, signature, outer
            elif _CHAINED in text:
                chained = True

    def _raised(self, line: Line) -> Signature | None:
        """What the exception of an event is, by its innermost cause."""
        told = line.fields.get("exception")
        if not isinstance(told, str):
            return None
        verdict = self.classify(told[: EXCEPTION_LINES_MAX * TEXT_MAX].splitlines()[:EXCEPTION_LINES_MAX])
        return verdict.signature if verdict and not verdict.signature.kernel else None


_WEIGHT: Final = {Role.CASCADE: 0, Role.CONFIRM: 1, Role.ROOT: 2}


class Signatures:
    """Findings of lines, each at most once in `EVERY` seconds for a signature of a rank; those in between are counted.

    Args:
        table: what is known.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._last: OrderedDict[tuple[str, str, int | None], tuple[float, int]] = OrderedDict()  # when it was told, how often it came since
        self._chained: OrderedDict[tuple[str, int | None, Stream], None] = OrderedDict()

    def see(self, line: Line) -> Finding | None:
        """What a line means, None where that is not known, or was told just now."""
        signature = self._table.match(line)
        if signature is None:
            if _CHAINED in line.text:
                _remember(self._chained, (line.node, line.rank, line.stream), None)
            return None
        outer = False
        if self._chained and signature.specificity <= _EXCEPTION:
            outer = self._chained.pop((line.node, line.rank, line.stream), self) is None
        key = (signature.id, line.node, line.rank)
        told, since = self._last.get(key, (None, 0))
        if told is not None and told <= line.at < told + EVERY:
            self._last[key] = (told, since + 1)
            return None
        _remember(self._last, key, (line.at, 0))
        return _finding(signature, line, outer=outer, since=since)


def _bare(text: str) -> bytes:
    """A text without its digits, in which most lines of a log are like one before."""
    return text.encode("utf-8", "replace").translate(None, b"0123456789")


def _either(words: Iterable[bytes]) -> bytes:
    """A regex that finds any of the words. It is a tree of letters, as `re` tries the branches of an alternation one after the other."""
    heads: dict[bytes, list[bytes]] = {}
    for word in sorted(set(words)):
        if not word:
            return b""  # a word that ends here is enough
        heads.setdefault(word[:1], []).append(word[1:])
    branches = [re.escape(head) + _either(rest) for head, rest in heads.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


_K = TypeVar("_K")
_V = TypeVar("_V")


def _remember(kept: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > REMEMBERED_MAX:
        kept.popitem(last=False)


def _finding(signature: Signature, line: Line, *, outer: bool, since: int) -> Finding:
    return Finding(
        at=line.at,
        detector="signature",
        kind=signature.id,
        summary=signature.summary,
        cls=signature.cls,
        role=Role.CASCADE if outer else signature.role,
        certainty=signature.certainty,
        scope=signature.scope,
        node=line.node,
        rank=line.rank,
        generation=line.generation,
        features=(Feature(name="repeats", value=float(since)),) if since else (),
        line=line.text[:TEXT_MAX],
    )


# --- files ---------------------------------------------------------------------------------------------------------------


def _merge(entries: dict[str, dict[str, Any]], document: Mapping[str, Any], name: str) -> None:
    """The entries of a file over those before it, by id."""
    for entry in document.get("xid", ()):
        number = entry.get("number")
        if not isinstance(number, int) or isinstance(number, bool):
            raise TableError(f"{name}: an [[xid]] has no number; give the one that the driver prints")
        pattern = rf"NVRM: Xid \([^)]{{1,60}}\): {number}\b"
        fixed = {"id": f"xid_{number}", "cues": ["NVRM: Xid"], "regex": pattern, "scope": "node", "kernel": True}
        _lay(entries, fixed | {key: value for key, value in entry.items() if key != "number"}, name)
    for entry in document.get("signature", ()):
        _lay(entries, entry, name)


def _lay(entries: dict[str, dict[str, Any]], entry: Mapping[str, Any], name: str) -> None:
    key = entry.get("id")
    if not isinstance(key, str) or not key:
        raise TableError(f"{name}: a [[signature]] has no id; give it a name of its own, or that of the one it changes")
    if unknown := entry.keys() - _KEYS:
        raise TableError(f"{name}: {key}: unknown key {min(unknown)!r}; known are {', '.join(sorted(_KEYS))}")
    entries[key] = entries.get(key, {}) | {**entry, "file": name}


def _parse(entry: Mapping[str, Any]) -> Signature:
    where = f"{entry['file']}: {entry['id']}"
    for key, kind in (("summary", str), ("class", str)):
        if not isinstance(entry.get(key), kind):
            raise TableError(f"{where}: {key!r} is missing; a new signature needs it")
    cues, regex = _sought(entry, where)
    if _RUNAWAY.search(regex):
        raise TableError(f"{where}: 'regex' repeats a group without a bound, which can take for ever; write {{0,20}} or the like")
    try:
        pattern = re.compile(regex) if regex else None
    except re.error as error:
        raise TableError(f"{where}: 'regex' is no regular expression: {error}") from error
    scope = entry.get("scope", "rank")
    if scope not in _SCOPES:
        raise TableError(f"{where}: 'scope' is {scope!r}; it may be {', '.join(_SCOPES)}")
    specificity = entry.get("specificity", 3)
    if not isinstance(specificity, int) or not 0 <= specificity <= 9:
        raise TableError(f"{where}: 'specificity' is {specificity!r}; it may be 0 to 9")
    return Signature(
        id=entry["id"],
        cues=cues,
        pattern=pattern,
        cls=_one(Class, entry["class"], where, "class"),
        summary=entry["summary"],
        role=_one(Role, entry.get("role", "root"), where, "role"),
        scope=scope,
        certainty=_one(Certainty, entry.get("certainty", "certain"), where, "certainty"),
        specificity=specificity,
        label=str(entry.get("label", "")),
        kernel=bool(entry.get("kernel", False)),
    )


def _sought(entry: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], str]:
    """Cues and regex of an entry; those of exceptions are made from their names."""
    names = entry.get("exceptions")
    cues = entry.get("cues") or names
    if not isinstance(cues, list) or not all(isinstance(cue, str) and len(_bare(cue)) > 2 for cue in cues):
        raise TableError(f"{where}: 'cues' must be texts of at least 3 characters that are no digits, of which one is in every line that is meant")
    if names and not entry.get("regex"):
        return tuple(cues), _RAISED % "|".join(map(re.escape, names))
    regex = entry.get("regex", "")
    if not isinstance(regex, str):
        raise TableError(f"{where}: 'regex' must be a text")
    return tuple(cues), regex


_E = TypeVar("_E", bound=StrEnum)


def _one(kind: type[_E], value: Any, where: str, key: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise TableError(f"{where}: {key!r} is {value!r}; it may be {', '.join(kind)}") from None
