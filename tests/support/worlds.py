"""Worlds of real processes for tests of `trainer`: each runs one function as a rank, over gloo and a real TCPStore, in a fork of a process that has
torch already.

Owns: starting, signalling and ending the ranks. Must not: know what they do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerContext, ForkServerProcess

OURS = ("ELASTICD_", "TORCH", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
"""How variables begin that a rank must not inherit from whoever runs the tests."""


@cache
def _context() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process with OpenMP threads hangs in its first parallel loop
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "trainer.session", "trainer.fit", "tests.trainer._programs"])
    return context


class Ranks:
    """The processes of one world. Use `world`.

    Args:
        program: a function of a module; called with `folder` and `arguments` in each rank. What it returns must be JSON.
        count: how many ranks; 0 for one process that nobody has given a place.
        folder: working directory of all; what they print goes to `rank-N.log` there.
        env: more variables, for all.
        nodes: on how many nodes they pretend to be.
        arguments: of the function.
    """

    def __init__(self, program: Callable[..., Any], count: int, folder: Path, env: dict[str, str], nodes: int, arguments: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*"):
            old.unlink()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)) if count else None
        self.processes: list[ForkServerProcess] = []
        for rank in range(max(count, 1)):
            variables = {**env, **(self._place(rank, count, nodes) if count else {})}
            process = _context().Process(target=_main, args=(program, rank, folder, variables, arguments))
            process.start()
            self.processes.append(process)

    def _place(self, rank: int, count: int, nodes: int) -> dict[str, str]:
        assert self._store is not None
        local = count // nodes
        values = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": self._store.port}
        named = {name: str(value) for name, value in values.items()}
        return {**named, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def send(self, rank: int, sig: signal.Signals) -> None:
        """Signal one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, sig)

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has noted so far (`note`)."""
        path = self.folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def await_line(self, wanted: Callable[[dict[str, Any]], bool], rank: int = 0, within: float = 60.0) -> dict[str, Any]:
        """Wait until a rank has noted something."""

        def look() -> dict[str, Any] | None:
            found = next((line for line in self.lines(rank) if wanted(line)), None)
            assert found or any(process.is_alive() for process in self.processes), self.story()
            return found

        try:
            found = await_(look, within=within, what="the note")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        assert found is not None
        return found

    def codes(self, within: float = 90.0) -> list[int | None]:
        """Wait for the end of all; their exit codes."""
        try:
            await_(lambda: not any(process.is_alive() for process in self.processes), within=within, what="the end of all ranks")
        except AssertionError as error:
            for rank in range(len(self.processes)):
                with contextlib.suppress(ProcessLookupError):
                    self.send(rank, signal.SIGABRT)  # faulthandler shows where it hangs
            raise AssertionError(f"{error}\n{self.story()}") from None
        return [process.exitcode for process in self.processes]

    def results(self, within: float = 90.0) -> list[Any]:
        """Wait for success of all; what they returned."""
        codes = self.codes(within)
        assert codes == [0] * len(codes), f"{codes}\n{self.story()}"
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(len(codes))]

    def story(self) -> str:
        """The end of what each printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("rank-*.log")))


@contextlib.contextmanager
def world(program: Callable[..., Any], count: int, folder: Path, *, env: dict[str, str] | None = None, nodes: int = 1, **arguments: Any) -> Iterator[Ranks]:
    """Ranks that run `program(folder, **arguments)`, and are gone afterwards."""
    with Ranks(program, count, folder, env or {}, nodes, arguments) as ranks:
        yield ranks


def run(program: Callable[..., Any], count: int, folder: Path, *, env: dict[str, str] | None = None, nodes: int = 1, **arguments: Any) -> list[Any]:
    """What each rank's `program(folder, **arguments)` returns."""
    with world(program, count, folder, env=env, nodes=nodes, **arguments) as ranks:
        return ranks.results()


def note(folder: Path, **values: Any) -> None:
    """In a rank: let the test know."""
    with (folder / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def _main(program: Callable[..., Any], rank: int, folder: Path, variables: dict[str, str], arguments: dict[str, Any]) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ.update(variables)
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # what a DataLoader finds in a process that was started from a command line
    try:
        result = program(folder, **arguments)
    except BaseException:
        traceback.print_exc()
        raise
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
