"""Stock torchrun over our rendezvous: nothing of ours but the handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.nodes import ROOT, SCRIPT, Nodes, alive, now
from tests.support.etcd import Authority, Server, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(200)
TORCHRUN = Path(sys.executable).with_name("torchrun")


class Torchrun:
    """Agents of stock torchrun, each a node that can be killed."""

    def __init__(self, folder: Path, endpoint: str, conf: str = "") -> None:
        self.nodes = Nodes(folder, [])  # for what workers log
        self._folder = folder
        self._endpoint = endpoint
        self._conf = conf
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *extra: str) -> subprocess.Popen[bytes]:
        command = [str(TORCHRUN), "--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=etcd-v3", "--rdzv-id=job", f"--rdzv-endpoint={self._endpoint}"]
        command += [f"--rdzv-conf=ttl=2,settle=0.5,state_dir={self._folder / 'state'}{self._conf}", "--local-addr=127.0.0.1", *extra, str(SCRIPT)]
        env = {**os.environ, "OUT": str(self.nodes.out), "OMP_NUM_THREADS": "1"}
        with (self._folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)
        return agent

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """SIGKILL the agent and its workers, as a machine's end would: stock torchrun leaves them behind."""
        children = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        for child in children:
            child.kill()
        agent.wait()

    def story(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self._folder.glob("agent-*.log")))

    def stepping(self, world: int, after: float) -> float:
        try:
            return self.nodes.stepping(world, after=after, within=60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.lose(agent)


@pytest.fixture
def torchrun(server: Server, tmp_path: Path) -> Iterator[Torchrun]:
    folder = tmp_path / "torchrun"
    folder.mkdir()
    run = Torchrun(folder, server.endpoint)
    yield run
    run.close()


def test_stock_torchrun_grows_and_survives_the_loss_of_its_first_node(torchrun: Torchrun) -> None:
    """Two nodes train, a third joins (with torch's own rendezvous that ends the job), then the first, rank 0's, is lost and two train on."""
    at = now()
    first = torchrun.start("--max-restarts=5")
    torchrun.start("--max-restarts=5")
    torchrun.stepping(2, at)
    at = now()
    torchrun.start("--max-restarts=5")
    torchrun.stepping(3, at)
    at = now()
    torchrun.lose(first)
    torchrun.stepping(2, at)


def test_a_worker_killed_under_stock_torchrun_is_replaced(torchrun: Torchrun) -> None:
    """Agents that count restarts differently still meet: their workers do not share a store prefixed by that count."""
    at = now()
    torchrun.start("--max-restarts=5")
    torchrun.start("--max-restarts=5")
    torchrun.stepping(2, at)
    for _ in range(2):
        victim = max(line["pid"] for line in torchrun.nodes.steps()[-4:] if line["rank"] == 0)
        at = now()
        os.kill(victim, signal.SIGKILL)
        torchrun.stepping(2, at)
        assert not alive(victim)


def test_tls_by_rdzv_conf(binary: Path, tmp_path: Path) -> None:
    """cacert, cert and key in --rdzv-conf; without them one clear line says that etcd did not answer."""
    authority = Authority(tmp_path / "ca")
    identity = authority.issue("server")
    client = authority.issue("client")
    folder = tmp_path / "torchrun"
    folder.mkdir()
    with running(Server(binary, tmp_path / "etcd", tls=(authority, identity))) as server:
        run = Torchrun(folder, server.endpoint, conf=f",cacert={authority.cacert},cert={client.cert},key={client.key}")
        try:
            at = now()
            run.start("--nnodes=1")
            run.stepping(1, at)
        finally:
            run.close()
        plain = Torchrun(tmp_path / "plain" / "x", server.endpoint)
        agent = plain.start("--nnodes=1")
        assert agent.wait(timeout=60) == 1
        assert server.endpoint in plain.story()
        assert "RendezvousConnectionError" in plain.story()


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("colour=blue", "--rdzv-conf has no key 'colour'"),
        ("ttl=soon", "--rdzv-conf ttl='soon' is not a number of seconds"),
        ("cacert=/nowhere/ca.pem", "/nowhere/ca.pem"),
    ],
)
def test_bad_options_are_named(server: Server, tmp_path: Path, conf: str, words: str) -> None:
    """A wrong key, a value that is no number, a file that is not there: the last line says which."""
    command = [str(TORCHRUN), "--nnodes=1", "--rdzv-backend=etcd-v3", "--rdzv-id=job", f"--rdzv-endpoint={server.endpoint}", f"--rdzv-conf={conf}"]
    ended = subprocess.run([*command, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "OUT": str(tmp_path)})
    assert ended.returncode == 1
    assert words in ended.stderr.strip().splitlines()[-1]
