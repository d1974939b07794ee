"""bench.faults: the table, the traces that are shipped, what is taken out of them, and one real recording."""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
import pytest

from bench import faults
from bench._faults_acts import UnavailableError, Volume, kernel_says
from bench._faults_jobs import ROOT
from bench._faults_kinds import KINDS, SECONDS, SPLITS, WINDOW, Kind, label, parse_name, trace_names
from bench._faults_pack import names_of_this_machine, pack, places
from bench._faults_read import TRACES, Trace, traces
from bench._faults_script import FORWARD_S
from detectors.observations import Change, Line, Phase, Ranks, Reading, Steps, Stream
from detectors.windows import Windows

SHIPPED = traces() if (TRACES / "labels.json").exists() else []
shipped = pytest.mark.skipif(not SHIPPED, reason="no traces are recorded yet: python -m bench.faults")

DRIFTED = ("compute_s", "data_s", "other_s", "loss")


def named(name: str) -> Trace:
    return next(trace for trace in SHIPPED if trace.name == name)


# --- the table -----------------------------------------------------------------------------------------------------------


def test_no_two_traces_have_the_same_seed() -> None:
    """What detectors are tuned on tells nothing of what they are judged by."""
    seeds = Counter(KINDS[kind].seed(split) for kind in KINDS for split in SPLITS)
    assert max(seeds.values()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_another_case_in_each_half(kind: str) -> None:
    """Amount, place or time differ, where something is done at all."""
    found = KINDS[kind]
    assert found.tuning != found.judging or found.act == "none"


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.fault], ids=lambda kind: kind.name)
def test_a_fault_says_what_should_be_said_of_it(kind: Kind) -> None:
    """And within how many windows."""
    assert kind.says
    assert kind.within > 0


def test_a_name_that_is_none_is_refused() -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match="tuning/kil"):
        parse_name("tuning/kil")
    with pytest.raises(SystemExit):
        faults.main(["--only", "kil"])


def test_the_bench_knows_how_long_a_forward_pass_takes() -> None:
    """As long as the training script says."""
    assert faults.FORWARD_S == FORWARD_S


def test_list_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """One a line, with what happens."""
    assert faults.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS)


# --- what is shipped -----------------------------------------------------------------------------------------------------


@shipped
def test_every_trace_of_the_table_is_shipped_and_no_other() -> None:
    """Labels, archives and the table name the same."""
    archives = {str(path.relative_to(TRACES)).removesuffix(".tar.gz") for path in TRACES.glob("*/*.tar.gz")}
    assert {trace.name for trace in SHIPPED} == archives == set(trace_names())


@shipped
def test_what_is_shipped_is_small() -> None:
    """All of it together."""
    assert sum(path.stat().st_size for path in TRACES.rglob("*") if path.is_file()) < 4_000_000


@shipped
@pytest.mark.parametrize("trace", SHIPPED, ids=lambda trace: trace.name)
def test_a_label_fits_the_table_and_its_trace(trace: Trace) -> None:
    """What was planned is what the label says, and it happened while the trace was recorded."""
    seen = {key: trace.label[key] for key in trace.label.keys() - label(trace.name).keys()}
    assert dict(trace.label) == {**label(trace.name), **seen, "node": trace.label["node"]}
    assert trace.label["started"] <= trace.label["began"] <= trace.label["ended"] <= trace.label["until"] + 1


@shipped
@pytest.mark.parametrize("trace", SHIPPED, ids=lambda trace: trace.name)
def test_a_trace_tells_of_four_ranks_in_the_order_of_time(trace: Trace) -> None:
    """With steps, sums over ranks, lines and readings of both nodes, from before the fault to the end."""
    kinds: Counter[type] = Counter()
    ranks, nodes, last = set(), set(), 0.0
    with trace.observations() as observed:
        for one in observed:
            kinds[type(one)] += 1
            last = max(last, one.at)
            if isinstance(one, Steps) and one.at < trace.label["began"] + 5:
                ranks.add(one.rank)
            if isinstance(one, Reading):
                nodes.add(one.node)
    assert ranks == {0, 1, 2, 3}
    assert nodes >= {"node-0", "node-1"}
    assert all(kinds[kind] for kind in (Steps, Ranks, Line, Reading, Change))
    assert trace.label["until"] - 3 < last < trace.label["until"] + 3


@shipped
@pytest.mark.parametrize("split", SPLITS)
def test_faults_are_seen_in_their_traces(split: str) -> None:
    """The plainest ones, by what nothing but them does."""
    with named(f"{split}/nonfinite").observations() as observed:
        bad = [one for one in observed if isinstance(one, Steps) and one.nonfinite.get("loss")]
    began = named(f"{split}/nonfinite").label["began"]
    assert began <= min(one.at for one in bad) < began + 3
    with named(f"{split}/xid").observations() as observed:
        said = [one for one in observed if isinstance(one, Line) and one.stream is Stream.KERNEL]
    assert said
    assert {one.node for one in said} == {named(f"{split}/xid").label["node"]}
    assert all(f": {named(f'{split}/xid').label['amount']}, pid=" in one.text for one in said)
    stopped = named(f"{split}/stop")
    with stopped.observations() as observed:
        assert max(one.at for one in observed if isinstance(one, Steps)) < stopped.label["began"] + 3
    with named(f"{split}/kill").observations() as observed:
        generations = {one.generation for one in observed if isinstance(one, Change) and one.phase is Phase.INIT}
    assert len(generations) == 2


@shipped
@pytest.mark.parametrize(("name", "share"), [("slow_50", 0.5), ("slow_20", 0.2), ("slow_10", 0.1)])
@pytest.mark.parametrize("split", SPLITS)
def test_a_slow_rank_is_as_slow_as_its_label_says(split: str, name: str, share: float) -> None:
    """Against its own first half, beside the others, which the busy machine slows down as well."""
    trace = named(f"{split}/{name}")
    work: dict[tuple[int, bool], list[float]] = {}
    with trace.observations() as observed:
        for one in observed:
            if isinstance(one, Steps) and one.at > trace.label["started"] + 5 and abs(one.at - trace.label["began"]) > 2:
                work.setdefault((one.rank, one.at > trace.label["began"]), []).append(one.phases["forward"] / (one.last - one.first + 1))
    slower = {rank: median(work[rank, True]) / median(work[rank, False]) for rank in range(4)}
    others = sorted(slower[rank] for rank in range(4) if rank != trace.label["rank"])
    assert slower[trace.label["rank"]] / others[1] == pytest.approx(1 + share, abs=0.3 * share + 0.02)


@shipped
@pytest.mark.parametrize("kind", ["drift_rank", "drift_job"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_drift_stays_within_the_noise_of_each_metric(split: str, kind: str) -> None:
    """The median of each moves by less than 2.5 robust deviations of its windows before; and all of them move the same way."""
    trace = named(f"{split}/{kind}")
    rows: dict[tuple[str, int, bool], list[float]] = {}
    windows = Windows(width=WINDOW)
    with trace.observations() as observed:
        for window in (window for one in observed for window in windows.see(one)):
            after = window.began > trace.label["began"] + 2
            if after or trace.label["started"] + 20 < window.began < trace.label["began"] - 1:
                for rank, row in window.rows.items():
                    for name in DRIFTED:
                        if name in row.values:
                            rows.setdefault((name, rank, after), []).append(row.values[name])
    for rank in range(4) if trace.label["rank"] is None else [trace.label["rank"]]:
        for name in DRIFTED:
            before, now = rows[name, rank, False], rows[name, rank, True]
            sigma = 1.4826 * median(abs(value - median(before)) for value in before)
            assert -1.0 * sigma < median(now) - median(before) < 2.5 * sigma, (name, rank)


@shipped
def test_a_stretched_trace_has_times_ten_times_as_far_apart() -> None:
    """And its label's times go along."""
    trace = SHIPPED[0]
    with trace.observations() as plain, trace.observations(stretch=10) as stretched:
        pairs = list(zip((one.at for one in plain), (one.at for one in stretched), strict=True))
    assert len(pairs) > 1000
    assert all(later == pytest.approx(trace.stretched(at, 10)) for at, later in pairs)
    assert pairs[-1][1] - pairs[0][1] == pytest.approx(10 * (pairs[-1][0] - pairs[0][0]))


@shipped
def test_a_finding_about_another_rank_is_not_right() -> None:
    """Nor one of another kind; what names no rank may be."""
    trace = Trace(name="tuning/slow_20", path=TRACES, label={**label("tuning/slow_20"), "node": "node-1"})
    rank = trace.label["rank"]
    assert trace.right("straggler", rank=rank, node="node-1")
    assert trace.right("straggler")
    assert not trace.right("straggler", rank=rank + 1)
    assert not trace.right("straggler", rank=rank, node="node-0")
    assert not trace.right("stragglers", rank=rank)
    disk = Trace(name="tuning/disk_fill", path=TRACES, label=label("tuning/disk_fill"))
    assert disk.right("disk_filling", node=disk.label["node"])
    assert not disk.right("a_disk_filling", node=disk.label["node"])


@shipped
def test_traces_do_not_name_this_machine() -> None:
    """Nor its user, nor where things lie on it."""
    assert list(faults.leaks(TRACES)) == []


# --- what is taken out ---------------------------------------------------------------------------------------------------


def test_a_path_of_this_machine_is_replaced_and_found_if_it_is_not(tmp_path: Path) -> None:
    """In whatever file it stands."""
    logs = tmp_path / "scratch" / "logs" / "train"
    (logs / "node-0").mkdir(parents=True)
    (logs / "node-0" / "agent.stderr").write_text(f"Traceback: {ROOT}/trainer/session.py {tmp_path}/scratch/x\n")
    archive = tmp_path / "out" / "tuning" / "one.tar.gz"
    pack(logs, archive, places=places(scratch=tmp_path / "scratch", root=ROOT))
    assert list(faults.leaks(tmp_path / "out")) == []
    with tarfile.open(archive) as tar:
        (entry,) = tar.getmembers()
        assert (entry.name, entry.uid, entry.uname) == ("train/node-0/agent.stderr", 0, "")
        file = tar.extractfile(entry)
        assert file is not None
        assert file.read() == b"Traceback: /app/trainer/session.py /scratch/x\n"
    first = archive.read_bytes()
    pack(logs, archive, places=places(scratch=tmp_path / "scratch", root=ROOT))
    assert archive.read_bytes() == first
    pack(logs, archive, places={})
    assert [leak for leak in faults.leaks(tmp_path / "out") if str(ROOT) in leak]
    assert str(ROOT) in names_of_this_machine(scratch=tmp_path, root=ROOT)


def test_lines_of_the_kernel_that_are_not_this_traces_are_left_out(tmp_path: Path) -> None:
    """The daemons of all traces read the same kernel; and of each node its own."""
    for node in ("node-0", "node-1"):
        (tmp_path / "train" / node).mkdir(parents=True)
        lines = [json.dumps({"event": "kernel_event", "text": text}) for text in ("NVRM: mine", "NVRM: another's")]
        (tmp_path / "train" / node / "daemon.stderr").write_text("\n".join(['{"event": "daemon_started"}', *lines]) + "\n")
    archive = tmp_path / "one.tar.gz"
    pack(tmp_path / "train", archive, places={}, kernel="NVRM: mine", node="node-1")
    with Trace(name="", path=archive, label={}).unpacked() as job:
        kept = {node: [json.loads(line).get("text") for line in (job / node / "daemon.stderr").read_text().splitlines()] for node in ("node-0", "node-1")}
    assert kept == {"node-0": [None], "node-1": [None, "NVRM: mine"]}


# --- what is done --------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_volume_fills_and_is_gone_with_its_holder(tmp_path: Path) -> None:
    """Bytes and inodes, on a file that takes up next to nothing."""
    try:
        volume = Volume(tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))
    try:
        before = os.statvfs(volume.path)
        volume.fill(50 << 30)
        volume.litter(1000)
        after = os.statvfs(volume.path)
    finally:
        volume.close()
    assert (before.f_bavail - after.f_bavail) * after.f_frsize == pytest.approx(50 << 30, rel=0.01)
    assert before.f_favail - after.f_favail == pytest.approx(1000, abs=10)
    assert (tmp_path / "volume.img").stat().st_blocks * 512 < 1 << 30
    assert not volume.path.exists()
    assert not any(str(tmp_path) in part.mountpoint for part in psutil.disk_partitions(all=True))


def test_what_the_kernel_was_made_to_say_comes_back(tmp_path: Path) -> None:
    """With the kernel's own time; nothing that anybody would take for a fault."""
    text = f"bench.faults says hello from {tmp_path.name}"
    try:
        said = kernel_says(text)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert said.startswith("[")
    assert said.endswith(f"] {text}")


@pytest.mark.timeout(400)
def test_a_fault_is_recorded_with_its_label_and_nothing_is_left(tmp_path: Path) -> None:
    """A worker is killed in a job of 20 s, and the trace shows it on the rank and node of the label."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    said = faults.record_all(["judging/kill"], tmp_path, jobs=1, seconds=20)
    assert said["judging/kill"] == "" or said["judging/kill"].startswith("spoilt")
    (trace,) = traces("judging", tmp_path)
    assert trace.label["rank"] == KINDS["kill"].judging.rank
    assert trace.label["began"] - trace.label["started"] == pytest.approx(KINDS["kill"].judging.begins * 20 / SECONDS, abs=1.5)
    with trace.observations() as observed:
        failed = [one for one in observed if isinstance(one, Line) and one.event == "worker_failed"]
    assert [one.node for one in failed] == [trace.label["node"]]
    assert failed[0].at == pytest.approx(trace.label["began"], abs=3)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert list(faults.leaks(tmp_path)) == []
