"""Drifts are acted on in the installed service, on three hosts: what is seen, decided and done, in this order, and what is left alone.

Seven minutes, so not in `make test-cluster`: `pytest -m root tests/cluster/test_acting.py`. Stand-ins: root in the place of the kernel, who writes its line
to the real /dev/kmsg of one host; a sleep in the place of work that takes longer.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from detectors.memory import BIGRAMS, FOREST, TEMPLATES
from tests.cluster.places import PROJECT, PYTHON
from tests.cluster.site import USER, Site
from tests.cluster.test_detectors import detector
from tests.cluster.test_service import await_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

    Begin = Callable[..., None]

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(580)]
OUT = "/srv/drifting"
SCRIPT = "/srv/drifting.py"
JOBS = ("broken", "weak", "slow", "diverges", "benign", "blind")
"""One for each test: what is done once for a job counts for a day."""
SLOW_JOBS = {"slow": 300.0}
"""Seconds between checkpoints, where not 5: a window with one in it is not compared."""
JOB_FILE = f"""\
argv = ["{PYTHON}", "-u", "{SCRIPT}"]
user = "{USER}"
min_nodes = 1
max_nodes = 3
[env]
OMP_NUM_THREADS = "1"
OUT = "{OUT}"
PYTHONPATH = "{PROJECT}"
[trainer]
snapshot_every = 1
checkpoint_every_s = {{every}}
telemetry_every_s = 0.5
"""
# Windows of 5 s instead of 10, and a job that is known to restart quickly, or it would take half an hour for a slow node to be worth a restart. One stop of
# a job in an hour, so that the second shows what a budget that is used up does.
MORE = """\
width = 5.0
[policy]
checkpoint_s = 0.2
restart_s = 3.0
persist_s = 10.0
certain_per_hour = 1
cluster_per_hour = 1000
"""
SAME = 65.0
"""Seconds after which what is found anew on a node is another incident, of which nothing has been done yet."""
LEARNT = 36
"""Windows, of which 30 at least are of nothing but training: from then on a rank's usual is believed."""
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def site(make_site: MakeSite) -> Site:
    made = make_site(3, ttl=4.0)
    made.detectors, made.more = True, MORE
    for host in made.hosts:
        made.configure(host)
        host.write(SCRIPT, Path(__file__).with_name("drifting.py").read_text())
    made.hosts[1].sh("mknod", "-m", "644", "/dev/kmsg", "c", "1", "11")  # on one alone: the kernel is one for all hosts
    for name in JOBS:
        made.job(name, JOB_FILE.format(every=SLOW_JOBS.get(name, 5.0)))
    made.start()
    return made


@pytest.fixture
def begin(site: Site) -> Iterator[Begin]:
    """Has a job train on so many hosts, with detectors that have seen it train for a while."""
    begun: list[str] = []

    def make(job: str, nodes: int = 3) -> None:
        site.heal()
        for host in site.hosts:
            host.sh("rm", "-rf", OUT)
            host.sh("install", "-d", "-o", USER, OUT)
            site.ctl(site.hosts[0], "uncordon", host.name, check=False)
        begun.append(job)
        site.ctl(site.hosts[0], "start", job, "--nodes", str(nodes), "--timeout", "90", timeout=100)
        await_(lambda: len(trains(site)) == nodes, within=60, what=f"training on {nodes} hosts", site=site)
        await_(lambda: sees(site, job), within=90, what="windows judged by the detectors of each host", site=site)

    yield make
    site.heal()
    for job in begun:
        site.ctl(site.hosts[0], "stop", job, "--yes", "--timeout", "60", timeout=70, check=False)
    for host in site.hosts:
        site.ctl(site.hosts[0], "uncordon", host.name, check=False)


def lines(site: Site, last: int | None = None) -> list[dict[str, Any]]:
    """Steps as the workers of all hosts have logged them, in the order of time."""
    show = f"tail -q -n {last}" if last else "cat"
    found: list[dict[str, Any]] = []
    for host in site.hosts:
        told = host.sh("sh", "-c", f'for f in {OUT}/steps-*.jsonl; do [ -e "$f" ] && {show} "$f"; done; true').stdout
        found += [json.loads(line) for line in told.splitlines() if line.endswith("}")]
    return sorted(found, key=lambda line: float(line["at"]))


def trains(site: Site) -> set[str]:
    """Nodes that have made a step in the last two seconds."""
    return {str(line["node"]) for line in lines(site, 5) if line["at"] > time.time() - 2.0}


def sees(site: Site, job: str, windows: int = 1) -> bool:
    """Whether the detectors of each host that trains have judged so many windows."""
    here = trains(site)
    told = [site.get(host, "/v1/anomalies?nodes=own")["detectors"][0] for host in site.hosts if host.name in here]
    return bool(told) and all(one["running"] and one["jobs"].get(job, {}).get("windows", 0) >= windows for one in told)


def anomalies(site: Site, host: Host) -> dict[str, Any]:
    return site.get(host, "/v1/anomalies")


def decisions(site: Site, job: str) -> list[dict[str, Any]]:
    """What was decided about a job, the oldest first."""
    policies = anomalies(site, site.hosts[0])["policies"]
    return next((list(one["decisions"]) for one in policies if one["job"] == job), [])


def acts(site: Site, job: str) -> list[tuple[str, str]]:
    """What of it did something: action and rule."""
    return [(one["action"], one["rule"]) for one in decisions(site, job) if one["action"] != "log"]


def on_node(site: Site, node: str, job: str) -> dict[str, Any]:
    """How a job stands on one node, by that node's daemon."""
    found = next(one for one in site.get(site.hosts[0], "/v1/nodes")["nodes"] if one["name"] == node)
    return next((dict(one) for one in found["jobs"] if one["name"] == job), {"state": "", "why": ""})


def generations(site: Site, job: str) -> list[dict[str, Any]]:
    return list(site.get(site.hosts[0], f"/v1/jobs/{job}/history")["generations"])


def kernel_says(host: Host, line: str) -> None:
    host.sh("sh", "-c", 'echo "$1" >/dev/kmsg', "sh", line)


def repeated(found: list[dict[str, Any]]) -> int:
    """Steps that were made more than once, counted on one rank of each generation: 0 if every generation went on where the last one stopped."""
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for line in found:
        firsts[line["generation"]] = min(firsts.get(line["generation"], line["step"]), line["step"])
        lasts[line["generation"]] = max(lasts.get(line["generation"], 0), line["step"])
    ordered = sorted(firsts)
    return sum(max(0, lasts[before] + 1 - firsts[after]) for before, after in itertools.pairwise(ordered))


# --- what is done ---------------------------------------------------------------------------------------------------------


def test_a_fatal_xid_drains_its_node_before_it_dies_and_a_second_one_finds_the_budget_used_up(site: Site, begin: Begin) -> None:
    begin("broken")
    second = site.hosts[1]
    began = time.time()
    kernel_says(second, XID)
    await_(lambda: ("exclude", "hardware") in acts(site, "broken"), within=20, what="the decision", site=site)
    (decided,) = [one for one in decisions(site, "broken") if one["action"] == "exclude"]
    assert (decided["node"], decided["until"]) == ("n2", None), "a broken node comes back when somebody has looked"
    await_(lambda: trains(site) == {"n1", "n3"}, within=40, what="training without n2", site=site)
    node = next(one for one in site.get(site.hosts[0], "/v1/nodes")["nodes"] if one["name"] == "n2")
    assert "goes before it fails" in node["reason"]
    order = [one["detail"] for one in generations(site, "broken")]
    assert "leave of n2" in order[-1], "it left in order; nobody was lost"
    found = lines(site)
    assert repeated([line for line in found if line["at"] > began - 5.0]) == 0, "nothing was done twice"
    shown = site.ctl(second, "explain", decided["about"]).stdout  # these hosts have no listener for each other
    assert XID in shown, "the line that it rests on"
    assert "exclude" in shown
    # The same again, once the operator has taken it back: the hour's budget is used up.
    site.ctl(site.hosts[0], "uncordon", "n2", "--reason", "looks well")
    await_(lambda: trains(site) == {"n1", "n2", "n3"}, within=60, what="training with n2 again", site=site)
    time.sleep(max(0.0, began + SAME - time.time()))
    kernel_says(second, XID.replace("1234", "1235"))
    await_(
        lambda: any(one["alert"] and one["wanted"] == "exclude" and one["action"] != "exclude" for one in decisions(site, "broken")),
        within=40,
        what="advice",
        site=site,
    )
    assert trains(site) == {"n1", "n2", "n3"}
    assert acts(site, "broken").count(("exclude", "hardware")) == 1


def test_an_oom_soon_after_a_fault_of_hardware_on_its_node_is_that_fault(site: Site, begin: Begin) -> None:
    """And one on another node is not: it is tried once more. Of free will nothing is done, for the job is paused."""
    begin("weak")
    first, second = site.hosts[:2]
    site.ctl(first, "pause", "weak", "--reason", "to see what failures come to")
    first.sh("touch", f"{OUT}/oom")
    await_(lambda: ("restart", "memory") in acts(site, "weak"), within=40, what="a restart", site=site)
    await_(lambda: trains(site) == {"n1", "n2", "n3"}, within=60, what="training on all again", site=site)
    kernel_says(second, XID)
    await_(lambda: any((one["rule"], one["wanted"]) == ("paused", "exclude") for one in decisions(site, "weak")), within=30, what="advice", site=site)
    second.sh("touch", f"{OUT}/oom")
    done = [("restart", "memory"), ("exclude", "hardware")]
    await_(lambda: acts(site, "weak") == done, within=40, what="the word that n2 is left out", site=site)
    await_(lambda: trains(site) == {"n1", "n3"}, within=60, what="training without n2", site=site)
    assert acts(site, "weak") == done
    told = next(one for one in decisions(site, "weak") if one["action"] == "exclude")
    assert told["why"].startswith("n2: ")
    assert re.search(r"rank \d on n2: torch.OutOfMemoryError: CUDA out of memory", told["why"]), told
    assert "n2: " in generations(site, "weak")[-1]["detail"]
    assert on_node(site, "n2", "weak")["why"].startswith("node n2 was left out: n2: ")
    site.ctl(first, "cordon", "n2", "--reason", "a new GPU")
    site.ctl(first, "uncordon", "n2")
    await_(lambda: on_node(site, "n2", "weak")["state"] == "running", within=60, what="an agent that stands by, for nobody joins a paused job", site=site)


def test_a_rank_that_is_20_percent_slow_is_named_and_a_node_that_stands_by_takes_its_place(site: Site, begin: Begin) -> None:
    begin("slow", nodes=2)
    here = sorted(trains(site))
    slow = next(host for host in site.hosts if host.name == here[-1])
    spare = next(host.name for host in site.hosts if host.name not in here)
    await_(lambda: sees(site, "slow", LEARNT), within=300, what="enough windows to know what is usual", site=site)
    slow.sh("touch", f"{OUT}/slow20")
    await_(lambda: ("exclude", "straggler") in acts(site, "slow"), within=120, what="the decision", site=site)
    (decided,) = [one for one in decisions(site, "slow") if one["action"] == "exclude"]
    assert decided["node"] == slow.name
    assert decided["until"] is not None, "a slow node comes back by itself"
    await_(lambda: spare in trains(site) and slow.name not in trains(site), within=60, what="the spare in its place", site=site)
    found = lines(site)
    before = [one for one in found if one["generation"] == found[0]["generation"]]
    assert pace(before[-60:]) > 1.1 * pace([line for line in found if line["node"] == spare][-30:]), "faster without it"


def pace(found: list[dict[str, Any]]) -> float:
    """Seconds a step, over some lines of one node."""
    one = [line for line in found if line["node"] == found[-1]["node"]]
    return float((one[-1]["at"] - one[0]["at"]) / max(1, one[-1]["step"] - one[0]["step"]))


def test_a_loss_that_is_no_number_goes_back_once_and_ends_the_job_if_it_returns(site: Site, begin: Begin) -> None:
    begin("diverges")
    await_(lambda: site.get(site.hosts[0], "/v1/jobs/diverges")["checkpoint_step"], within=30, what="a checkpoint", site=site)
    for host in site.hosts:
        host.sh("touch", f"{OUT}/nan")
    await_(lambda: ("rollback", "divergence") in acts(site, "diverges"), within=30, what="the decision", site=site)
    for host in site.hosts:
        host.sh("rm", "-f", f"{OUT}/nan")
    bad = max(line["generation"] for line in lines(site))
    await_(lambda: any(line["generation"] > bad for line in lines(site, 5)), within=40, what="the next generation", site=site)
    found = lines(site)
    assert all(line["loss"] is not None for line in found if line["generation"] > bad), "it went on from before that"
    assert acts(site, "diverges") == [("rollback", "divergence")], "one action, though the workers of all three hosts said it"
    for host in site.hosts:
        host.sh("touch", f"{OUT}/nan")
    await_(lambda: site.get(site.hosts[0], "/v1/jobs/diverges")["state"] == "failed", within=60, what="the end", site=site)
    told = site.get(site.hosts[0], "/v1/jobs/diverges")
    assert "again after a return to a good state" in told["why"]


# --- what is left alone ---------------------------------------------------------------------------------------------------


def test_hostile_lines_and_twenty_changes_of_the_world_are_left_alone(site: Site, begin: Begin) -> None:
    begin("benign")
    host = site.hosts[0]
    host.sh("touch", f"{OUT}/babble")
    for number in range(10):
        site.ctl(host, "checkpoint", "benign", "--timeout", "30", timeout=40)
        size = 2 + number % 2
        site.ctl(host, "scale", "benign", str(size), "--timeout", "60", timeout=70)
        await_(lambda size=size: len(trains(site)) == size, within=40, what=f"training on {size}", site=site)  # type: ignore[misc]
    assert acts(site, "benign") == []
    assert anomalies(site, host)["detectors"][0]["running"]


def test_detectors_that_die_a_memory_that_is_damaged_and_an_etcd_away_leave_training_alone(site: Site, begin: Begin) -> None:
    begin("blind")
    host = site.hosts[0]
    agents = [site.agent_pid(one, "blind") for one in site.hosts]
    where = "/var/lib/elasticd/detectors/blind"
    host.sh("install", "-d", "-o", "elasticd", where)
    for name in (TEMPLATES, BIGRAMS, FOREST):
        host.sh("sh", "-c", 'echo garbage >"$1"', "sh", f"{where}/{name}")
    old = detector(host)
    host.sh("kill", "-KILL", str(old))
    await_(lambda: anomalies(site, host)["detectors"][0]["restarts"] >= 1 and sees(site, "blind", 2), within=90, what="detectors that see again", site=site)
    assert "detector_died" in host.journal("elasticd")
    assert host.journal("elasticd").count("learning it anew") >= 3, "each damaged file is named"
    for one in site.hosts:
        site.etcd.pause_member(one)
    await_(lambda: "nothing_is_decided" in host.journal("elasticd"), within=30, what="a word that nothing is decided", site=site)
    assert trains(site) == {"n1", "n2", "n3"}
    for one in site.hosts:
        site.etcd.resume_member(one)
    await_(lambda: "decides_again" in host.journal("elasticd"), within=60, what="decisions again", site=site)
    assert [site.agent_pid(one, "blind") for one in site.hosts] == agents
    assert acts(site, "blind") == []
