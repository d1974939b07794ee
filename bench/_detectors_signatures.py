"""Signatures on logs of others: which failure a log tells of, false alarms on healthy logs, and what a line costs.

Owns: these rows, and how the logs are split. Must not: know how the table is made.

`gpualert-eval` holds logs of failed runs in 15 classes, each the seeded variations of one to three captures. Files that are the same but for their
numbers are of one template; half of a class' templates, the lower half by hash, may be looked at to tune the table, and the rest judges it. Of a class
with one template that template judges. These logs are short and hold little besides the failure, so they are also put behind the output of a healthy
run, as a failure comes in practice. The keyword grep is what one writes in an afternoon: a word or two for each class, in order.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._common import Row, progress
from detectors.signatures import Table

_BEFORE = 1000  # lines of a healthy run that are put before a failure
_TIME_LIMIT = "DUE TO TIME LIMIT"
_GREP = (
    ("cuda_oom", "cuda out of memory"),
    ("oom_killer", "killed"),
    ("ram_oom", "memoryerror"),
    ("nccl", "nccl"),
    ("segfault", "segmentation fault"),
    ("nan_loss", "nan"),
    ("missing_module", "no module named"),
    ("file_not_found", "no such file"),
    ("permission", "permission denied"),
    ("div_zero", "division by zero"),
    ("assertion", "assertionerror"),
    ("device_mismatch", "same device"),
    ("cuda_runtime", "cuda error"),
    ("runtime_error", "runtimeerror"),
    ("traceback", "traceback"),
)
_ALARM = re.compile("error|fail|nccl|killed|timeout|nan|exception|warn", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Log:
    name: str
    mode: str
    lines: tuple[str, ...]

    @property
    def template(self) -> str:
        masked = "\n".join(re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+|\d+", "#", line)).strip() for line in self.lines)
        return hashlib.sha256(masked.encode()).hexdigest()


def rows(data: Path | None, quick: bool) -> list[Row]:
    """All rows of signatures; none, and a word of that, without the data.

    Args:
        data: the folder that holds `gpualert-eval` and `bigscience-logs`.
        quick: fewer repetitions for what is timed.
    """
    if data is None:
        progress("signatures: no public logs were given, these rows are left out")
        return []
    healthy = {path.name: path.read_text(errors="replace").splitlines() for path in sorted((data / "bigscience-logs").glob("*.out"))}
    return [*_classes(data / "gpualert-eval" / "corpus", list(healthy.values())), *_healthy(healthy, 3 if quick else 11)]


# --- which failure a log tells of ----------------------------------------------------------------------------------------


def _classes(corpus: Path, healthy: Sequence[Sequence[str]]) -> list[Row]:
    logs = _injected(corpus)
    if not logs:
        progress(f"signatures: no logs in {corpus}, these rows are left out")
        return []
    judged = _judged(logs)
    table = Table.load()
    peers: dict[str, Callable[[_Log], str]] = {"elasticd": lambda log: _label(table, log), "keyword grep": _grep}
    found = []
    sets = [("signatures_macro_f1", logs), ("signatures_macro_f1_judged", judged)]
    if healthy:
        sets += [("signatures_macro_f1_after_healthy", _behind(logs, healthy))]
    for name, some in sets:
        for peer, classify in peers.items():
            by_class = _f1([(log.mode, classify(log)) for log in some])
            worst = min(by_class, key=lambda mode: (by_class[mode], mode))
            note = f"{len(some)} logs in {len(by_class)} classes; min and max over classes" + (f", the lowest {worst}" if by_class[worst] < 1 else "")
            score = sum(by_class.values()) / len(by_class)
            found.append(Row(name=name, peer=peer, median=score, min=min(by_class.values()), max=max(by_class.values()), unit="F1", note=note))
    return found


def _injected(corpus: Path) -> list[_Log]:
    """The injected logs, by the labels where there are any; what a log is named says the same."""
    labels: dict[str, str] = {}
    if (path := corpus / "labels.jsonl").is_file():
        labels = {entry["id"]: entry["mode"] for entry in map(json.loads, path.read_text().splitlines())}
    found = []
    for path in sorted((corpus / "injected").glob("*.log")):
        lines = tuple(path.read_text(errors="replace").splitlines())
        found.append(_Log(name=path.stem, mode=labels.get(path.stem, path.stem.partition("-injected")[0]), lines=lines))
    return found


def _judged(logs: Iterable[_Log]) -> list[_Log]:
    templates: dict[str, dict[str, list[_Log]]] = defaultdict(lambda: defaultdict(list))
    for log in logs:
        templates[log.mode][log.template].append(log)
    return [log for of_mode in templates.values() for template in sorted(of_mode)[len(of_mode) // 2 :] for log in of_mode[template]]


def _behind(logs: Sequence[_Log], healthy: Sequence[Sequence[str]]) -> list[_Log]:
    """Each log behind the first lines of a healthy run, one run after the other."""
    before = [[line for line in lines[:_BEFORE] if _TIME_LIMIT not in line] for lines in healthy]
    return [_Log(name=log.name, mode=log.mode, lines=(*before[index % len(before)], *log.lines)) for index, log in enumerate(logs)]


def _label(table: Table, log: _Log) -> str:
    verdict = table.classify(log.lines)
    return (verdict.signature.label or verdict.signature.id) if verdict else ""


def _grep(log: _Log) -> str:
    text = "\n".join(log.lines).lower()
    return next((mode for mode, word in _GREP if word in text), "")


def _f1(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """F1 of each class, from pairs of what it was and what was said."""
    counts = Counter(pairs)
    found = {}
    for mode in sorted({was for was, _ in pairs}):
        hits = counts[mode, mode]
        missed = sum(number for (was, said), number in counts.items() if was == mode != said)
        false = sum(number for (was, said), number in counts.items() if said == mode != was)
        found[mode] = 2 * hits / (2 * hits + missed + false)
    return found


# --- healthy logs, and what a line costs ------------------------------------------------------------------------------------


def _healthy(logs: Mapping[str, Sequence[str]], repetitions: int) -> list[Row]:
    lines = [line for log in logs.values() for line in log]
    if not lines:
        progress("signatures: no healthy logs, these rows are left out")
        return []
    table = Table.load()
    ours = [line for line in lines if table.find(line) and _TIME_LIMIT not in line]
    limits = sum(_TIME_LIMIT in line for line in lines)
    found_limits = sum(bool(table.find(line)) for line in lines if _TIME_LIMIT in line)
    grep = [line for line in lines if _ALARM.search(line) and _TIME_LIMIT not in line]
    note = f"of {len(lines)} lines of healthy runs, besides {limits} that tell of a time limit"
    found = [
        Row.of("signatures_false_hits", "elasticd", [float(len(ours))], unit="lines", note=f"{note}, of which {found_limits} were found"),
        Row.of("signatures_false_hits", "keyword grep", [float(len(grep))], unit="lines", note=note),
    ]
    verdicts = [table.classify(log) for log in logs.values()]
    blamed = [verdict for verdict in verdicts if verdict and _TIME_LIMIT not in verdict.line]
    blamed_by_grep = [name for name, log in logs.items() if _grep(_Log(name=name, mode="", lines=tuple(log)))]
    found += [
        Row.of("signatures_healthy_blamed", "elasticd", [float(len(blamed))], unit="logs", note=f"of {len(logs)} healthy runs, said to have failed"),
        Row.of("signatures_healthy_blamed", "keyword grep", [float(len(blamed_by_grep))], unit="logs"),
    ]
    first = [_microseconds(Table(table.signatures).find, lines) for _ in range(repetitions)]
    again = [_microseconds(table.find, lines) for _ in range(repetitions)]
    regexes = [signature.pattern for signature in table.signatures if signature.pattern]
    some = lines[:: max(1, len(lines) // 500)]
    each = [_microseconds(lambda line: next((True for regex in regexes if regex.search(line)), None), some) for _ in range(min(3, repetitions))]
    return [
        *found,
        Row.of("signatures_cost_line", "elasticd", first, unit="us", note="a table that has seen nothing yet, lines of healthy runs"),
        Row.of("signatures_cost_line_warm", "elasticd", again, unit="us", note="a table that has seen lines like these"),
        Row.of("signatures_cost_line", "keyword grep", [_microseconds(_ALARM.search, lines) for _ in range(repetitions)], unit="us"),
        Row.of("signatures_cost_line", "every regex", each, unit="us", note=f"the same regexes without cues, {len(some)} of the lines"),
    ]


def _microseconds(look: Callable[[str], object], lines: Sequence[str]) -> float:
    """Processor time of a line."""
    gc.collect()
    began = time.process_time()
    for line in lines:
        look(line)
    return 1e6 * (time.process_time() - began) / len(lines)
