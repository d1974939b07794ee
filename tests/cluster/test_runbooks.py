"""Each runbook is followed against the fault that fires its alert: what it tells people to type works there, shows the fault, and its cure ends the alert.

Real are hosts, daemons, agents, a job that trains, etcd, Prometheus with the shipped rules (`rehearsed`: hours pass in a minute) and Alertmanager. Stand-ins:
ssh (see `oncall`), NVML (tests.support.nvml), and root in the place of the kernel, who writes its lines to the real /dev/kmsg. What is done by hand only is in
docs/runbooks/followed.md.
"""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.etcd import CLIENT_TLS, put_keys
from tests.cluster.oncall import RUNBOOKS
from tests.cluster.places import ROOT
from tests.cluster.rehearsal import CHECKPOINTS, JOB, LOGS, OFTEN, PORT, Rehearsal, rehearse, says
from tests.cluster.site import CONFIG, JOBS, Site
from tests.support.etcd import await_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import MakeSite
    from tests.cluster.hosts import Host

# Some ten minutes by themselves: `pytest -m root tests/cluster/test_runbooks.py`, after a runbook or an alert has changed.
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def rehearsal(make_site: MakeSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearse(make_site(3), tmp_path_factory) as made:
        yield made


@pytest.fixture
def run(rehearsal: Rehearsal) -> Iterator[Rehearsal]:
    """All is well: three nodes train, and Prometheus sees them."""
    rehearsal.hush()
    for host in rehearsal.site.hosts:
        host.sh("systemctl", "reset-failed")  # starts are counted anew: systemd refuses the sixth within five minutes
        host.sh("systemctl", "start", "elasticd")
    if not rehearsal.trains():
        rehearsal.mend()
    rehearsal.await_training()
    yield rehearsal
    rehearsal.hush()


@pytest.fixture
def kernel(run: Rehearsal) -> Host:
    """The host that reads the kernel's log."""
    host = run.site.hosts[1]
    assert run.watch.query(f'elasticd_kernel_log_readable{{instance="{host.address}"}} == 1')
    return host


# --- the daemon ----------------------------------------------------------------------------------------------------------


def test_prometheus_without_targets(run: Rehearsal) -> None:
    run.watch.retarget([])
    run.fires("ElasticdAbsent")
    said = run.follows("ElasticdAbsent")
    assert "is valid prometheus config file syntax" in said
    assert '"scrapePool":"elasticd"' not in said
    run.watch.retarget([f"{host.address}:{PORT}" for host in run.site.hosts])
    run.ends("ElasticdAbsent")
    assert '"scrapePool":"elasticd"' in run.follows("ElasticdAbsent")


def test_a_daemon_that_crashes_again_and_again_until_systemd_gives_up(run: Rehearsal) -> None:
    host = run.site.hosts[2]
    for number in range(6):
        killed = run.site.daemon_pid(host)
        host.sh("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "elasticd")
        if number == 3:
            run.fires("ElasticdCrashLooping", instance=host.address)
            assert re.search(r"NRestarts=[3-9]", run.follows("ElasticdCrashLooping", host))
        await_(lambda old=killed: settled(run.site, host, old), within=60, what="a start, or none any more")  # type: ignore[misc]
        if state_of(host) == "failed":
            break
        run.site.await_ready(host)
    run.fires("ElasticdDown", instance=host.address)
    said = run.follows("ElasticdDown", host, fails={"systemctl status": 3, "curl": 7})
    assert "Start request repeated too quickly" in said
    run.cures("ElasticdDown", "systemctl reset-failed elasticd", on=host)
    run.cures("ElasticdDown", "systemctl start elasticd", on=host)
    run.ends("ElasticdDown")


def state_of(host: Host) -> str:
    """Of the daemon's unit. It is "activating" while systemd waits before it starts it again, and until it says that it is ready."""
    return host.sh("systemctl", "show", "-P", "ActiveState", "elasticd").stdout.strip()


def settled(site: Site, host: Host, old: int) -> bool:
    """Whether the daemon has been started anew since it had this process id, or will not be."""
    return state_of(host) == "failed" or (state_of(host) == "active" and site.daemon_pid(host) not in {0, old})


def test_a_decision_loop_that_a_debugger_holds(run: Rehearsal) -> None:
    host = run.site.hosts[2]
    debugger = host.popen("python", "-I", "-S", "-c", DEBUGGER, str(run.site.daemon_pid(host)))
    try:
        assert debugger.stdout is not None
        assert debugger.stdout.readline() == "held\n"
        run.fires("ElasticdLoopStalled", instance=host.address)
        said = run.follows("ElasticdLoopStalled", host)
        assert "t (tracing stop)" in said
        assert re.search(r"TracerPid:\s+[1-9]", said)
        assert "ptrace_stop" in said
        debugger.kill()  # it lets go, as the page asks; a daemon that is killed before is not gone until then
        run.ends("ElasticdLoopStalled")
        run.site.await_ready(host)
        assert run.types("ssh NODE curl -s http://ADDRESS:9464/livez", NODE=host.name, ADDRESS=host.address).out == "ok\n"
    finally:
        debugger.kill()
        debugger.communicate()
        run.site.await_ready(host)


DEBUGGER = """\
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT of the main thread alone
    if libc.ptrace(request, int(sys.argv[1]), None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
print("held", flush=True)
signal.pause()
"""


def test_a_certificate_that_ends_soon(run: Rehearsal) -> None:
    """A daemon that starts with it shows it at once; a renewed one is shown after a minute."""
    host = run.site.hosts[2]
    certificates = run.site.etcd.certificates
    mine = certificates.folder / "nodes" / host.name
    for path in mine.iterdir():
        path.unlink()
    mine.rmdir()
    certificates.run("--days=1", "node", host.name)
    put_keys(host, mine, CLIENT_TLS, "elasticd:elasticd", mode=0o400)
    host.sh("systemctl", "restart", "elasticd")
    fired = run.fires("ElasticdCertExpiring", severity="critical")
    assert (fired["certificate"], fired["instance"]) == ("etcd", host.address)
    said = run.follows("ElasticdCertExpiring", host)
    assert f"elasticd-node-{host.name}" in said
    run.cures("ElasticdCertExpiring", "deploy/etcd/certs.py --dir=CERTS renew")
    put_keys(host, mine, CLIENT_TLS, "elasticd:elasticd", mode=0o400)
    run.cures("ElasticdCertExpiring", "systemctl reload elasticd", on=host)
    run.ends("ElasticdCertExpiring", within=100)


def test_two_machines_of_one_name(run: Rehearsal) -> None:
    """Hosts share the kernel's boot id, as a service sees it; the second is given its own, as another machine has."""
    first, second = run.site.hosts[1:]
    dropin, own = "/etc/systemd/system/elasticd.service.d/boot.conf", "/srv/boot_id"
    configured = second.read(CONFIG)
    second.sh("sh", "-c", f"cat /proc/sys/kernel/random/boot_id >{own}")
    second.write(dropin, f"[Service]\nBindReadOnlyPaths={own}:/proc/sys/kernel/random/boot_id\n")
    second.write(CONFIG, configured.replace(f'node = "{second.name}"', f'node = "{first.name}"'))
    nodes = run.site.etcd.certificates.folder / "nodes"
    try:
        put_keys(second, nodes / first.name, CLIENT_TLS, "elasticd:elasticd", mode=0o400)
        second.sh("systemctl", "daemon-reload")
        second.sh("systemctl", "restart", "--no-block", "elasticd")
        run.fires("ElasticdNotRegistered", instance=second.address)
        said = run.follows("ElasticdNotRegistered", second)
        assert 'Status: "not registered' in said
        assert f"is registered by another machine or boot ({first.address})" in said
    finally:
        second.write(CONFIG, configured)
        put_keys(second, nodes / second.name, CLIENT_TLS, "elasticd:elasticd", mode=0o400)
        second.sh("rm", dropin)
        second.sh("systemctl", "daemon-reload")
        run.cures("ElasticdNotRegistered", "systemctl restart elasticd", on=second)
    run.ends("ElasticdNotRegistered")


# --- etcd ----------------------------------------------------------------------------------------------------------------


def test_etcd_without_its_majority(run: Rehearsal) -> None:
    first, second, third = run.site.hosts
    for member in (first, second):
        run.site.etcd.stop_member(member)
    run.fires("ElasticdFrozen")
    run.fires("ElasticdStoreUnreachable", instance=third.address)
    run.fires("ElasticdStoreErrors", instance=third.address)
    said = run.follows("ElasticdFrozen", member=first)
    assert said.count("\ninactive\n") == 2
    unreached = {"elasticctl status": 4, "endpoint health": 1, "curl": 7}
    said = run.follows("ElasticdStoreUnreachable", third, member=first, fails=unreached)
    assert 'Status: "etcd is out of reach' in said
    run.follows("ElasticdStoreErrors", third, fails=unreached)
    run.cures("ElasticdFrozen", "systemctl start etcd", on=first)
    for alert in ("ElasticdFrozen", "ElasticdStoreUnreachable", "ElasticdStoreErrors"):
        run.ends(alert)
    run.cures("ElasticdFrozen", "systemctl start etcd", on=second)
    run.site.etcd.await_healthy()
    assert "thawed" in third.journal("elasticd")
    assert run.follows("ElasticdStoreUnreachable", third, member=first).count("is healthy") == 1


# --- a job ---------------------------------------------------------------------------------------------------------------


def test_a_script_that_fails_until_its_restarts_are_used_up(run: Rehearsal) -> None:
    run.cures("ElasticdRestartBudgetLow", "elasticctl stop JOB")
    run.say("fail", run.site.hosts[0])
    run.types("elasticctl start JOB --again --max-restarts 1 --detach")
    run.fires("ElasticdRestartBudgetLow", within=90)
    said = run.follows("ElasticdRestartBudgetLow")
    assert "1/1 used" in said
    run.fires("ElasticdJobFailed")
    rank = re.search(r"rank (\d) on n1: RuntimeError", run.follows("ElasticdJobFailed"))
    assert rank
    assert "RuntimeError: the script was told to fail" in run.follows("ElasticdJobFailed", R=rank[1])
    run.hush()
    run.cures("ElasticdJobFailed", "elasticctl start JOB --again")
    run.ends("ElasticdJobFailed")
    run.cures("ElasticdRestartBudgetLow", "elasticctl stop JOB")
    run.cures("ElasticdRestartBudgetLow", "elasticctl start JOB --again --max-restarts N", N="50")
    assert "0/50 used" in run.types("elasticctl status JOB").out
    run.ends("ElasticdRestartBudgetLow")


def test_a_job_that_no_node_may_run(run: Rehearsal) -> None:
    run.types("elasticctl stop JOB -y")
    for host in run.site.hosts:
        run.types("elasticctl cordon NODE --reason WHY", NODE=host.name)
    run.types("elasticctl start JOB --again --detach")
    run.fires("ElasticdJobNotRunning")
    run.fires("ElasticdNodeCordoned", instance=run.site.hosts[1].address)
    assert run.follows("ElasticdJobNotRunning").count("cordoned") >= 3
    assert "cordoned: rehearsal" in run.follows("ElasticdNodeCordoned", run.site.hosts[1])
    for host in run.site.hosts:
        run.cures("ElasticdNodeCordoned", "elasticctl uncordon NODE", NODE=host.name)
    run.ends("ElasticdJobNotRunning")
    run.ends("ElasticdNodeCordoned")


def test_a_slow_node_that_is_taken_out_and_then_is_missing(run: Rehearsal) -> None:
    slow = run.site.hosts[2]
    run.say("slow", slow)
    run.fires("ElasticdStragglerRank")
    run.follows("ElasticdStragglerRank", slow)
    slowest = run.watch.query(prometheus_says("ElasticdStragglerRank", "topk"))
    assert max(slowest, key=lambda one: float(one["value"][1]))["metric"]["instance"] == slow.address
    run.cures("ElasticdStragglerRank", "elasticctl drain NODE", NODE=slow.name)
    run.ends("ElasticdStragglerRank")
    run.hush()
    run.fires("ElasticdNodesDrift")
    assert "rehearsal" not in run.follows("ElasticdNodesDrift")
    run.types("elasticctl scale JOB 2 --min 2")
    run.ends("ElasticdNodesDrift")
    run.types("elasticctl scale JOB 3 --min 3 --detach")
    few = run.fires("ElasticdBelowMinNodes")
    assert few["severity"] == "critical"
    assert "drained" in run.follows("ElasticdBelowMinNodes")
    run.cures("ElasticdBelowMinNodes", "elasticctl scale JOB N --min N", N="2")
    run.ends("ElasticdBelowMinNodes")
    run.types("elasticctl uncordon NODE", NODE=slow.name)
    run.types("elasticctl scale JOB 3")


def test_batches_that_come_late(run: Rehearsal) -> None:
    run.say("hungry")
    run.fires("ElasticdDataStarved")
    run.follows("ElasticdDataStarved")
    assert all(float(one["value"][1]) > 0.03 for one in run.watch.query(prometheus_says("ElasticdDataStarved", "avg")))
    run.hush()
    run.ends("ElasticdDataStarved")


def test_a_worker_that_holds_up_all_others(run: Rehearsal) -> None:
    held = run.site.hosts[2]
    run.say("hold", held)
    run.fires("ElasticdTrainingStalled")
    run.follows("ElasticdTrainingStalled", held)
    run.cures("ElasticdTrainingStalled", "elasticctl drain NODE", NODE=held.name)
    run.ends("ElasticdTrainingStalled")
    run.hush()
    run.types("elasticctl uncordon NODE", NODE=held.name)


def test_a_loss_that_is_no_number_any_more(run: Rehearsal) -> None:
    """And back to the last good checkpoint, as the page says."""
    run.types("elasticctl checkpoint JOB --timeout 30")
    good = copied(run)
    run.say("nan")
    run.fires("ElasticdNonFiniteLoss")
    run.follows("ElasticdNonFiniteLoss")
    run.cures("ElasticdNonFiniteLoss", "elasticctl stop JOB")
    run.hush()
    for host in run.site.hosts:
        host.sh("sh", "-c", f"rm -rf {CHECKPOINTS}/{JOB}/{host.name}/step-*; cp -a /srv/good/. {CHECKPOINTS}/{JOB}/{host.name}/ 2>/dev/null; true")
    root = run.site.etcd.certificates.root
    access = f"ETCDCTL_ENDPOINTS=https://{run.site.etcd.endpoints[0]} ETCDCTL_CACERT={root.cacert} ETCDCTL_CERT={root.cert} ETCDCTL_KEY={root.key} "
    (remedy,) = re.findall(r"`(etcdctl del [^`]*)`", (RUNBOOKS / "ElasticdNonFiniteLoss.md").read_text())
    assert run.types(access + remedy).out.split() == ["1"]
    run.cures("ElasticdNonFiniteLoss", "elasticctl start JOB --again")
    run.ends("ElasticdNonFiniteLoss")
    run.await_training()
    restored = {json.loads(line)["step"] for line in restores(run)}
    assert good in restored


def copied(run: Rehearsal) -> int:
    """Keep the newest checkpoint of each node, as the page tells to; its step."""
    steps = []
    for host in run.site.hosts:
        told = host.sh(
            "sh",
            "-c",
            f"rm -rf /srv/good; mkdir /srv/good; d=$(ls -d {CHECKPOINTS}/{JOB}/{host.name}/step-* | tail -n 1); cp -a $d /srv/good/; echo $d",
            check=False,
        )
        steps += re.findall(r"step-0*(\d+)", told.stdout)
    newest = max(map(int, steps))
    for host in run.site.hosts:
        host.sh("sh", "-c", f"cd /srv/good && for d in step-*; do case $d in *{newest}.*) ;; *) rm -rf $d ;; esac; done")
    return newest


def restores(run: Rehearsal) -> list[str]:
    """Lines of agents that tell where states came from."""
    return [line for host in run.site.hosts for line in host.sh("sh", "-c", f"grep -h state_ready {LOGS}/{JOB}/{host.name}/agent.jsonl").stdout.splitlines()]


def test_a_world_that_changes_again_and_again_and_takes_long_to_train_again(run: Rehearsal) -> None:
    host = run.site.hosts[1]
    run.types("elasticctl stop JOB -y")
    run.say("late")
    run.types("elasticctl start JOB --again --max-restarts 50 --detach")
    for _ in range(7):
        generation = run.job()["generation"]
        run.kill_worker(host)
        await_(lambda before=generation: run.job()["generation"] > before, within=30, what="the next generation")  # type: ignore[misc]
    run.fires("ElasticdRescaleFlapping")
    assert run.follows("ElasticdRescaleFlapping", host).count("worker_failed of n2") >= 7
    causes = {
        one["metric"]["cause"]: float(one["value"][1]) for one in run.watch.query(prometheus_says("ElasticdRescaleFlapping", "max").replace("[1h]", "[60s]"))
    }
    assert 5.5 < causes["worker_failed"] < 9, "once for the job, not for each of its nodes"
    run.fires("ElasticdRecoverySlow", within=60)
    run.follows("ElasticdRecoverySlow")
    phases = {
        one["metric"]["phase"]: float(one["value"][1]) for one in run.watch.query(prometheus_says("ElasticdRecoverySlow", "sum").replace("[1h]", "[60s]"))
    }
    assert max(phases, key=lambda phase: phases[phase]) == "start"
    run.fires("ElasticdGoodputLow")
    run.follows("ElasticdGoodputLow")
    run.hush()
    for alert in ("ElasticdRescaleFlapping", "ElasticdRecoverySlow", "ElasticdGoodputLow"):
        run.ends(alert, within=100)


def prometheus_says(alert: str, begin: str) -> str:
    """The query of a runbook that begins so, for our job."""
    asked: list[str] = re.findall(r"`([^`\n]+)`", (RUNBOOKS / f"{alert}.md").read_text())
    found = next(one for one in asked if one.startswith((f"{begin} ", f"{begin}(")))
    return found.replace('"JOB"', f'"{JOB}"')


def test_steps_that_are_lost_with_a_worker_where_no_snapshots_are_taken(run: Rehearsal) -> None:
    """Agents that live know what had been made: so it is told after a worker's death, and not after a power cut of all nodes."""
    run.types("elasticctl config set snapshots=false checkpoint_every_s=600 --job JOB")
    run.types("elasticctl restart JOB --reason WHY -y")
    run.await_training()
    run.types("elasticctl checkpoint JOB --timeout 30")  # from here on it is the only one
    since = run.watch.query(f'max(elasticd_job_step{{job_name="{JOB}"}})')[0]["value"][1]
    await_(lambda: run.watch.query(f'max(elasticd_job_step{{job_name="{JOB}"}}) > {float(since) + 150}'), within=60, what="150 steps without a snapshot")
    run.kill_worker(run.site.hosts[1])
    run.fires("ElasticdStepsLost")
    said = run.follows("ElasticdStepsLost", run.site.hosts[1])
    assert re.search(r"snapshots\s+false", said)
    assert "worker_failed of n2" in said
    run.types("elasticctl config unset snapshots --job JOB")
    run.types(f"elasticctl config set {OFTEN} --job JOB")
    run.types("elasticctl restart JOB --reason WHY -y")
    run.ends("ElasticdStepsLost", within=150)


def test_a_job_that_was_paused_and_forgotten(run: Rehearsal) -> None:
    run.types("elasticctl pause JOB --reason WHY")
    run.fires("ElasticdPausedTooLong")
    assert "pause by oncall" in run.follows("ElasticdPausedTooLong")
    run.cures("ElasticdPausedTooLong", "elasticctl resume JOB")
    run.ends("ElasticdPausedTooLong")


def test_an_agent_that_reports_nothing(run: Rehearsal) -> None:
    host = run.site.hosts[2]
    host.sh("kill", f"-{int(signal.SIGSTOP)}", str(run.site.agent_pid(host, JOB)))
    run.fires("ElasticdReportStale", instance=host.address)
    assert f"{JOB}.json" in run.follows("ElasticdReportStale", host)
    run.cures("ElasticdReportStale", "elasticctl drain NODE", NODE=host.name)
    run.ends("ElasticdReportStale")
    run.types("elasticctl uncordon NODE", NODE=host.name)


# --- a node --------------------------------------------------------------------------------------------------------------


def test_a_job_file_that_is_refused(run: Rehearsal) -> None:
    host = run.site.hosts[1]
    host.write(JOBS / "broken.toml", 'name = "broken"\nargv = 3\n')
    host.sh("systemctl", "reload", "elasticd")
    run.fires("ElasticdNodeProblem", instance=host.address)
    said = run.follows("ElasticdNodeProblem", host, fails={"check-config": 2})
    assert said.count("broken.toml: argv: ") >= 3, "each look names file and key"
    host.sh("rm", str(JOBS / "broken.toml"))
    run.cures("ElasticdNodeProblem", "systemctl reload elasticd", on=host)
    run.ends("ElasticdNodeProblem")


def test_checkpoints_on_a_full_disk(run: Rehearsal) -> None:
    for host in run.site.hosts:
        host.sh("mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", CHECKPOINTS)
        host.sh("chown", "elasticd:elasticd", CHECKPOINTS)
        host.sh("dd", "if=/dev/zero", f"of={CHECKPOINTS}/gone.bad", "bs=1M", check=False)
    try:
        for alert in ("ElasticdDiskFull", "ElasticdCheckpointFailing", "ElasticdCheckpointStale"):
            run.fires(alert)
        failing = run.watch.query("elasticd_job_checkpoint_failures_total > 2")
        host = next(one for one in run.site.hosts if one.address == failing[0]["metric"]["instance"])
        assert "100% " + CHECKPOINTS in run.follows("ElasticdDiskFull", host)
        assert "checkpoint_disk_full" in run.follows("ElasticdCheckpointFailing", host)
        for one in run.site.hosts:
            one.sh("sh", "-c", f"rm {CHECKPOINTS}/*.bad")
        run.follows("ElasticdCheckpointStale", host)  # and the last line of it asks for one, which comes
        for alert in ("ElasticdDiskFull", "ElasticdCheckpointStale", "ElasticdCheckpointFailing"):
            run.ends(alert, within=60)
    finally:
        for one in run.site.hosts:
            one.sh("umount", "-l", CHECKPOINTS)


def test_logs_on_a_disk_that_fills_up(run: Rehearsal) -> None:
    host = run.site.hosts[1]
    host.sh("mount", "-t", "tmpfs", "-o", "size=256m,mode=755,nr_inodes=10100", "tmpfs", LOGS)
    try:
        host.sh("chown", "elasticd:elasticd", LOGS)
        host.sh("sh", "-c", f"mkdir -p {LOGS}/old/{host.name} && cd {LOGS}/old/{host.name} && seq 300 | xargs touch")
        run.fires("ElasticdInodesLow", instance=host.address, volume="logs")
        assert f"301 {LOGS}/old/{host.name}" in run.follows("ElasticdInodesLow", host)
        host.sh("dd", "if=/dev/zero", f"of={LOGS}/old/{host.name}/big", "bs=1M", "count=210")
        run.fires("ElasticdDiskFilling", instance=host.address, volume="logs")
        assert f"{LOGS}/old/{host.name}" in run.follows("ElasticdDiskFilling", host)
        run.cures("ElasticdDiskFilling", "rm -r", on=host, JOB="old")
        run.ends("ElasticdDiskFilling")
        run.ends("ElasticdInodesLow")
    finally:
        host.sh("umount", "-l", LOGS)


def test_what_the_kernel_says(kernel: Host, run: Rehearsal) -> None:
    says(kernel, "<3>I/O error, dev nvme9n9, sector 1234 op 0x0:(READ) flags 0x0")
    says(kernel, "<3>Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:2kB")
    run.fires("ElasticdKernelFault", instance=kernel.address, kind="io")
    run.fires("ElasticdKernelOom", instance=kernel.address)
    said = run.follows("ElasticdKernelFault", kernel)
    assert '"event": "kernel_event"' in said
    assert "nvme9n9" in said
    assert "Killed process 4242" in run.follows("ElasticdKernelOom", kernel)
    run.ends("ElasticdKernelFault")
    run.ends("ElasticdKernelOom")


def test_a_drop_in_that_takes_the_kernels_log_away(kernel: Host, run: Rehearsal) -> None:
    dropin = "/etc/systemd/system/elasticd.service.d/log.conf"
    kernel.write(dropin, "[Service]\nProtectKernelLogs=yes\n")
    kernel.sh("systemctl", "daemon-reload")
    kernel.sh("systemctl", "restart", "elasticd")
    run.fires("ElasticdKernelLogUnreadable", instance=kernel.address)
    said = run.follows("ElasticdKernelLogUnreadable", kernel)
    assert f"DropInPaths={dropin}" in said
    assert "ProtectKernelLogs=yes" in said
    assert "kernel_log_unreadable" in said
    kernel.sh("rm", dropin)
    kernel.sh("systemctl", "daemon-reload")
    run.cures("ElasticdKernelLogUnreadable", "systemctl restart elasticd", on=kernel)
    await_(lambda: not [one for one in run.watch.firing("ElasticdKernelLogUnreadable") if one["instance"] == kernel.address], within=40, what="its end")


# --- GPUs: a stand-in for NVML ---------------------------------------------------------------------------------------------

PYNVML = """\
import json, sys
from standin_nvml import Gpu, StandInNvml
class FromFile(StandInNvml):
    def nvmlInit(self):
        with open("/srv/gpus.json") as file:
            self.gpus = [Gpu(**one) for one in json.load(file)]
        super().nvmlInit()
sys.modules[__name__] = FromFile()
"""


@pytest.fixture
def gpu(kernel: Host, run: Rehearsal) -> Iterator[Host]:
    """The host that reads the kernel's log has a GPU; its job does not know of it."""
    (packages,) = kernel.sh("sh", "-c", "ls -d /opt/elasticd/current/lib/python3*/site-packages").stdout.split()
    kernel.write(f"{packages}/standin_nvml.py", (ROOT / "tests/support/nvml.py").read_text())
    kernel.write(f"{packages}/pynvml.py", PYNVML)
    change(kernel)
    kernel.sh("systemctl", "restart", "elasticd")
    run.site.await_ready(kernel)
    yield kernel
    kernel.sh("rm", f"{packages}/pynvml.py")
    kernel.sh("systemctl", "restart", "elasticd")
    run.site.await_ready(kernel)


def change(host: Host, **values: Any) -> None:
    """What its NVML says from now on."""
    host.write("/srv/gpus.json", json.dumps([{"uuid": "GPU-stand-in", "bus": "00000000:3B:00.0", **values}]))


def test_a_sick_gpu(gpu: Host, run: Rehearsal) -> None:
    change(gpu, temperature=91, throttle_reasons=0x40, uncorrected=2)
    says(gpu, "<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=0, GPU has fallen off the bus.")
    alerts = ("ElasticdGpuXid", "ElasticdGpuHot", "ElasticdGpuEccUncorrected", "ElasticdGpuThrottled")
    for alert in alerts:
        assert run.fires(alert, instance=gpu.address)["gpu"] == "0"
    for alert in alerts:
        run.follows(alert, gpu)
    assert "Xid (PCI:0000:3b:00): 79" in run.follows("ElasticdGpuXid", gpu)
    assert run.watch.query("elasticd_gpu_last_xid")[0]["value"][1] == "79"
    change(gpu)
    for alert in alerts:
        run.ends(alert)


# --- all of them ---------------------------------------------------------------------------------------------------------


def test_every_silence_is_taken_by_a_real_alertmanager(rehearsal: Rehearsal) -> None:
    pages = sorted(RUNBOOKS.glob("Elasticd*.md"))
    for page in pages:
        (line,) = re.findall(r"^Silence: `(amtool silence add .*)`$", page.read_text(), flags=re.MULTILINE)
        rehearsal.types(line, NODE="n1", NAME="etcd")
    silences = json.loads(rehearsal.types("amtool silence query -o json").out)
    assert sorted(matcher["value"] for silence in silences for matcher in silence["matchers"] if matcher["name"] == "alertname") == [
        page.stem for page in pages
    ]
