"""Which members may train together: those whose code, data and settings are alike.

Owns: comparing the fingerprints that members bring. Must not: know what a part means or how it is digested, or decide anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from elasticd.rendezvous.records import MemberRecord

if TYPE_CHECKING:
    from elasticd.rendezvous.view import Keyed

SHOWN: Final = 60
"""Characters of a part that people are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One member that is not like those before it.

    Attributes:
        part: the first part, by name, that differs.
        other: a node that has `expected`.
    """

    node: str
    part: str
    value: str
    other: str
    expected: str

    def __str__(self) -> str:
        mine, theirs = set(self.value.split()), set(self.expected.split())
        here, there = (" ".join(sorted(words))[:SHOWN] or "-" for words in (mine - theirs, theirs - mine))
        return f"{self.node} differs in {self.part} ({here}, {self.other} has {there})"


def alike(members: Sequence[Keyed[MemberRecord]]) -> tuple[list[Keyed[MemberRecord]], list[Difference]]:
    """Those that are like the first, in their order, and how each of the others differs.

    A part that only one of two members has is no difference; the first that has a part sets what the others are measured by.
    """
    measure: dict[str, tuple[str, str]] = {}
    kept: list[Keyed[MemberRecord]] = []
    differences: list[Difference] = []
    for keyed in members:
        parts, node = keyed.record.fingerprint, keyed.record.id.node
        other = next((part for part in sorted(parts) if part in measure and measure[part][0] != parts[part]), None)
        if other is not None:
            expected, whose = measure[other]
            differences.append(Difference(node=node, part=other, value=parts[other], other=whose, expected=expected))
            continue
        kept.append(keyed)
        for part, value in parts.items():
            measure.setdefault(part, (value, node))
    return kept, differences
