"""A pretended store for the pure tests.

Owns: records, revisions, and the comparisons that `transitions` uses; nothing else of etcd, which the tests of members and of kv run for real.
"""

from __future__ import annotations

from elasticd.kv.types import Compare, KeyValue, Listing, Put, Target
from elasticd.rendezvous.transitions import Txn


class PretendStore:
    """Keys with revisions, and transactions over them."""

    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.revision = 1

    def listing(self) -> Listing:
        return Listing(revision=self.revision, items=tuple(self.items.values()))

    def txn(self, txn: Txn) -> bool:
        if not all(self._holds(compare) for compare in txn.compares):
            return False
        self.revision += 1
        for op in txn.ops:
            if isinstance(op, Put):
                self.put(op.key, op.value, bump=False)
            else:
                self.items.pop(op.key, None)
        return True

    def put(self, key: str, value: bytes, *, bump: bool = True) -> None:
        self.revision += bump
        known = self.items.get(key)
        self.items[key] = KeyValue(key=key, value=value, create_revision=known.create_revision if known else self.revision, mod_revision=self.revision)

    def remove(self, key: str) -> None:
        self.revision += self.items.pop(key, None) is not None

    def _holds(self, compare: Compare) -> bool:
        if compare.prefix:
            return all(item.mod_revision < compare.value for item in self.items.values() if item.key.startswith(compare.key))
        item = self.items.get(compare.key)
        seen = 0 if item is None else item.create_revision if compare.target is Target.CREATE else item.mod_revision
        return seen == compare.value
