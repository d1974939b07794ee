"""Which kind of line a line is: an id that stays the same while the numbers, names and paths in it change.

Owns: the ids and how often each was seen. Must not: say what is unusual, or know what a kind of line means.

An event has its name for a kind: the id is made of its logger, its name and the type of its exception. Of plain text what varies is masked. A line's
id depends on the line alone, so that ids of one run can be compared with those of another.

Masking is slow and kinds are few: what was masked is kept, under the line with all its digits made zeros (no mask looks at which digit it is).
"""

from __future__ import annotations

import itertools
import json
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from detectors.observations import Line

TEMPLATES_MAX: Final = 1024
"""Kinds that are told apart; all others are one more, `OVERFLOW`."""
MASKED_MAX: Final = 256
"""Characters of a line that its kind depends on."""
RARE: Final = 3
"""A kind is rare up to so many lines."""
OVERFLOW: Final = "overflow"
_CACHED_MAX: Final = 8 * TEMPLATES_MAX
_EXCEPTION_MAX: Final = 4096  # characters of an exception's text in which its last line is looked for
_ID_MAX: Final = 32
_VERSION: Final = 1  # of the masks: ids of another one say nothing

_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_SAME_DIGIT: Final = str.maketrans("123456789", "000000000")
_NAME: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,95}")
_EXCEPTION: Final = re.compile(r"([A-Za-z_][\w.]{0,127})(?::|$)")
_MASKS: Final = (
    (re.compile(r"\"[^\"]{0,200}\"|(?<![\w'])'[^']{0,200}'(?!\w)"), "<q>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\b0[xX][0-9a-fA-F]+\b|\b(?=[a-fA-F]{0,63}\d)(?=\d{0,63}[a-fA-F])[0-9a-fA-F]{8,64}\b"), "<hex>"),
    (re.compile(r"(?<![\w/])(?:[A-Za-z][A-Za-z0-9+.]{0,15}://|~?/)[^\s:,;()\[\]<>\"']{2,}"), "<path>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"), "<ip>"),
    (re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"), "<n>"),
    (re.compile(r"<n>(?:[\s,;|]+<n>)+"), "<n>"),
    (re.compile(r"[\u2580-\u259f]+"), " "),
    (re.compile(r"([-=#*._~+>|])\1{2,}"), r"\1"),
    (re.compile(r"\s+"), " "),
)


class Template:
    """A kind of line.

    Attributes:
        id: a few characters.
        text: its first line, masked; for people.
        count: how many lines were of this kind, that at hand among them.
    """

    __slots__ = ("count", "id", "text")

    def __init__(self, id: str, text: str, count: int = 0) -> None:  # noqa: A002 - it is one
        self.id = id
        self.text = text
        self.count = count

    @property
    def first(self) -> bool:
        """Whether the line at hand is the first of its kind."""
        return self.count == 1

    @property
    def rare(self) -> bool:
        """Whether there were few like it."""
        return self.count <= RARE


class Templates:
    """The kinds of lines of one job type.

    Args:
        most: kinds that are told apart.
    """

    def __init__(self, *, most: int = TEMPLATES_MAX) -> None:
        self._most = most
        self._templates: dict[str, Template] = {}
        self._cache: dict[object, Template] = {}
        self._overflow = Template(OVERFLOW, "")

    def see(self, line: Line) -> Template:
        """The kind of a line, which is counted. That what is given changes with the next line of the kind."""
        event = line.event
        key: object = (line.logger, event, exception_type(line.fields)) if event else line.text[:MASKED_MAX].encode("utf-8", "replace").translate(_ZEROS)
        found = self._cache.get(key)
        if found is None:
            found = self._look(line, key)
        found.count += 1
        return found

    @property
    def overflowed(self) -> int:
        """Lines that were of no kind that is told apart. Many of them are a sign: something fills the log with what nobody has seen."""
        return self._overflow.count

    def __len__(self) -> int:
        return len(self._templates)

    def dump(self) -> str:
        """For the next run, as JSON: kinds that were seen more than once. What a flood of nonsense has left is not among them."""
        kinds = {one.id: [one.count, one.text] for one in self._templates.values() if one.count > 1}
        return json.dumps({"version": _VERSION, "templates": kinds}, separators=(",", ":"))

    @classmethod
    def load(cls, text: str, *, most: int = TEMPLATES_MAX) -> Self:
        """What an earlier run of the same job type knew.

        Raises:
            ValueError: it is none of `dump`'s, or of a version that masked otherwise.
        """
        loaded = cls(most=most)
        try:
            document = json.loads(text)
            if document["version"] != _VERSION:
                raise ValueError(f"templates of version {document['version']!r:.20}, not {_VERSION}")
            for id_, (count, example) in itertools.islice(document["templates"].items(), most):
                if type(count) is not int or not 0 < count < 2**63 or not isinstance(example, str):
                    raise ValueError(f"template {id_!r:.40} has no count or no text")
                loaded._templates[id_[:_ID_MAX]] = Template(id_[:_ID_MAX], example[: 4 * MASKED_MAX], count)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a list of templates: {error!r:.200}") from None
        return loaded

    def _look(self, line: Line, key: object) -> Template:
        text = mask(line.text) if isinstance(key, bytes) else _event_text(line)
        id_ = id_of(text)
        found = self._templates.get(id_)
        if found is None and len(self._templates) < self._most:
            found = self._templates[id_] = Template(id_, text)
        if found is None:
            found = self._overflow
        if len(self._cache) >= _CACHED_MAX:
            self._cache.clear()
        self._cache[key] = found
        return found


def mask(text: str) -> str:
    """`text` without what varies between lines of one kind: numbers, ids, addresses, paths, what stands in quotes, bars of progress."""
    text = text[:MASKED_MAX].translate(_SAME_DIGIT)  # as it is asked for (`Templates.see`): which digits there are changes nothing
    for pattern, mark in _MASKS:
        text = pattern.sub(mark, text)
    return text.strip()


def _event_text(line: Line) -> str:
    """What stands for an event, whatever its fields hold. Others than us log whole sentences as events."""
    name = line.event if _NAME.fullmatch(line.event) else mask(line.event)
    return f"{line.logger[:MASKED_MAX]} {name} {exception_type(line.fields)}".strip()


def id_of(text: str) -> str:
    """The id of a masked line."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def exception_type(fields: Mapping[str, Any]) -> str:
    """Of an event that tells of an exception its type, as the last line of the traceback names it; "" of others."""
    text = fields.get("exception")
    if not isinstance(text, str):
        return ""
    last = text[-_EXCEPTION_MAX:].rstrip().rpartition("\n")[2]
    match = _EXCEPTION.match(last)
    return match[1] if match else ""
