"""Real processes for these tests: each is this file, run as a program.

Owns: what a helper process does. Must not: assert anything; the tests do.

A helper prints one line when it is ready, does what the lines of its standard input say, and ends when that ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import structlog

ROOT = Path(__file__).resolve().parents[2]


class Helper:
    """A helper process, seen from the test. `ready` is what it said first."""

    def __init__(self, what: str, **arguments: Any) -> None:
        command = [sys.executable, "-m", "tests.rendezvous.helpers", what, json.dumps(arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.ready = self._hear()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: str) -> Any:
        """Say one line and hear the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the helper ended with {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL, and reap; stopped or not."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def hold_lock(directory: str, node: str) -> None:
    """Hold a node's lock."""
    from elasticd.rendezvous.nodelock import NodeLock

    with NodeLock(Path(directory), "cluster", "job", node):
        say("held")
        sys.stdin.read()


def answer_echoes(incarnation: str, running: int, port: int = 0) -> None:
    """Run a PeerMonitor that answers."""
    from elasticd.rendezvous.peers import PeerMonitor, bind
    from elasticd.rendezvous.records import MemberId

    monitor = PeerMonitor(bind("127.0.0.1", port), lambda _identity: None)
    monitor.start()
    monitor.answer_as(MemberId(node="helper", incarnation=incarnation), running)
    say(monitor.port)
    sys.stdin.read()
    monitor.close()


def be_member(**arguments: Any) -> None:
    """Be one member that trains whatever it is assigned: it obeys, and says what it does when asked."""
    from tests.rendezvous.nodes import Node, config_of

    node = Node(config_of(**arguments))
    node.start()
    say(node.member.id.incarnation)
    answers = {"running": lambda: node.running, "incarnation": lambda: node.member.id.incarnation, "starts": lambda: node.starts}
    for line in sys.stdin:
        say(answers[line.strip()]())
    node.close()


def main() -> None:
    """Run the helper named on the command line."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is for answers
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    {"hold_lock": hold_lock, "answer_echoes": answer_echoes, "be_member": be_member}[what](**arguments)


if __name__ == "__main__":
    main()
