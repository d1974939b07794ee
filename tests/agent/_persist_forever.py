"""Run by test_persist: persists twelve states one after the other, says what is done, and waits to be killed.

python -m tests.agent._persist_forever ROOT GENERATION FIRST_STEP
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticd.agent.persist import Persister
from tests.support.states import State, make_state
from trainer.checkpoint import Keep, Manifest


@contextmanager
def reading(state: State) -> Iterator[tuple[bytes, memoryview]]:
    yield state.layout.header, state.image


def say(manifest: Manifest) -> None:
    print(f"done {manifest.generation} {manifest.step}", flush=True)


def main() -> None:
    root, generation, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    persister = Persister(root, job="digits", keep=Keep(last=1), done=say)
    states = [make_state(generation, number, nbytes=1_000_000) for number in range(step, step + 12)]
    print("ready", flush=True)
    for state in states:
        persister.want(state.info, lambda state=state: reading(state))
        assert persister.wait(30)
    sys.stdin.read()


if __name__ == "__main__":
    main()
