"""A Prometheus that scrapes hosts by the rules that are shipped, an Alertmanager, and whoever it would wake.

Owns: these three while a test runs, and their configurations, made of the shipped ones. Must not: know hosts, or decide which alert is right.

What is changed of the shipped files: addresses; intervals, which are seconds; and times in the rules. `hurried`: each `for`, a minute becomes five seconds.
`rehearsed`: a minute becomes a second in each `for`, range and offset, and in limits of seconds that are named here.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import yaml

from tests.cluster.places import ROOT
from tests.support.etcd import await_, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SHIPPED = ROOT / "deploy" / "prometheus"
PROGRAMS = {"prometheus": "prometheus", "prometheus-alertmanager": "prometheus-alertmanager"}
"""Program -> package."""
INTERVAL = "1s"
MINUTE = 5
"""Seconds that stand for a minute of `for`."""


def missing() -> str:
    """Why this machine cannot have them, "" if it can."""
    lacking = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"needs the packages {', '.join(lacking)}" if lacking else ""


def hurried(rules: dict[str, Any]) -> dict[str, Any]:
    """The same rules, but that whoever waits for minutes waits for seconds."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                number, unit = re.fullmatch(r"(\d+)([hm])", rule["for"]).groups()  # type: ignore[union-attr]
                rule["for"] = f"{int(number) * MINUTE * {'h': 60, 'm': 1}[unit]}s"
    return rules


RANGE_MIN = 4
"""Seconds of a range at least: rates need a few scrapes."""
FOR_MAX = 5
LIMITS = {
    "ElasticdCrashLooping": {"[30m]": "[90s]"},  # systemd waits 5 s before each start
    "ElasticdTrainingStalled": {"> 300": "> 5", "> 900": "> 15"},
    "ElasticdGoodputLow": {"> 3600": "> 30"},
    "ElasticdStepsLost": {"> 300": "> 1"},
    "ElasticdRecoverySlow": {"> 60": "> 5"},
    "ElasticdReportStale": {"> 60": "> 5"},
    "ElasticdPausedTooLong": {"[24h]": "[10s]", "offset 24h": "offset 10s"},
    "ElasticdTelemetryDropped": {"> 60": "> 5"},
}
"""Alert -> what of its expression is replaced by what in `rehearsed`, as its fault would take too long."""


def rehearsed(rules: dict[str, Any]) -> dict[str, Any]:
    """The same rules for a rehearsal: hours pass in a minute or two."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            for shipped, instead in LIMITS.get(rule.get("alert", ""), {}).items():
                assert shipped in rule["expr"], (rule["alert"], shipped)
                rule["expr"] = rule["expr"].replace(shipped, instead)
            rule["expr"] = re.sub(r"(\[|offset )(\d+[hm])(?=\]|\W)", lambda found: f"{found[1]}{max(RANGE_MIN, _minutes(found[2]))}s", rule["expr"])
            if "for" in rule:
                rule["for"] = f"{min(FOR_MAX, _minutes(rule['for']))}s"
    return rules


def _minutes(duration: str) -> int:
    return int(duration[:-1]) * {"h": 60, "m": 1}[duration[-1]]


@dataclass(frozen=True)
class Message:
    """One alert in one message of Alertmanager's.

    Attributes:
        receiver: whom it is for.
        at: when it came, on the monotonic clock.
    """

    receiver: str
    firing: bool
    labels: dict[str, str]
    annotations: dict[str, str]
    at: float

    @property
    def name(self) -> str:
        """Of the alert."""
        return self.labels["alertname"]


class Inbox:
    """Takes what Alertmanager sends."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.messages += [
                    Message(
                        receiver=told["receiver"], firing=one["status"] == "firing", labels=one["labels"], annotations=one["annotations"], at=time.monotonic()
                    )
                    for one in told["alerts"]
                ]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="inbox")
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Nothing is taken any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Monitoring:
    """See the module; a context manager.

    Args:
        folder: for configurations, data and logs.
        targets: host:port of each daemon.
        rules: makes of the shipped rules those that Prometheus is given.
    """

    def __init__(self, folder: Path, targets: Sequence[str], *, rules: Callable[[dict[str, Any]], dict[str, Any]] = hurried) -> None:
        self._folder = folder
        self._targets = list(targets)
        self._rules = rules
        self._stack = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.prometheus, self.alertmanager = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.inbox = Inbox()
        self._stack.callback(self.inbox.close)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._configure()
            listen = ("--web.listen-address",)
            self._launch("prometheus-alertmanager", f"--storage.path={self._folder / 'alerts'}", *listen, self.alertmanager, "--cluster.listen-address=")
            self._launch("prometheus", f"--storage.tsdb.path={self._folder / 'data'}", *listen, self.prometheus)
            for address in (self.alertmanager, self.prometheus):
                await_(lambda url=f"http://{address}/-/ready": answers(url), within=60, what=f"{address} ready")  # type: ignore[misc]
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all three."""
        self._stack.close()

    @property
    def folder(self) -> Path:
        """Where configurations and rules lie."""
        return self._folder

    def retarget(self, targets: Sequence[str]) -> None:
        """Let Prometheus scrape others from now on."""
        self._targets = list(targets)
        self._configure()
        self._daemons["prometheus"].send_signal(signal.SIGHUP)

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Labels of each alert of this name that fires by Prometheus, whether or not somebody is told."""
        return [one["metric"] for one in self.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What Prometheus answers to an expression: `metric` and `value` of each."""
        url = f"http://{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])

    def await_message(self, fits: Callable[[Message], bool], *, within: float, what: str) -> Message:
        """Wait for the first message that fits; tells what came instead."""
        try:
            return await_(lambda: next((one for one in self.inbox.messages if fits(one)), None), within=within, what=what)  # type: ignore[return-value]
        except AssertionError as error:
            came = [(one.firing, one.labels) for one in self.inbox.messages]
            raise AssertionError(f"{error}\ncame: {came}\nfiring or pending: {self.query('ALERTS')}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last words of both programs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.log")))

    def _configure(self) -> None:
        rules = yaml.safe_load((SHIPPED / "elasticd.rules.yml").read_text())
        (self._folder / "elasticd.rules.yml").write_text(yaml.safe_dump(self._rules(rules)))
        config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = self._targets
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [self.alertmanager]
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        routes = yaml.safe_load((SHIPPED / "alertmanager.yml").read_text())
        routes["route"] |= {"group_wait": INTERVAL, "group_interval": INTERVAL}
        for receiver in routes["receivers"]:
            for hook in receiver.get("webhook_configs", []):
                hook["url"] = f"http://{self.inbox.address}/"
        (self._folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))

    def _launch(self, program: str, *arguments: str) -> None:
        config = self._folder / f"{program.rpartition('-')[2]}.yml"
        command = ["setpriv", "--pdeathsig", "KILL", program, f"--config.file={config}", "--log.level=warn", *arguments]
        with (self._folder / f"{program}.log").open("w") as log:
            started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder)
        self._daemons[program] = started
        self._stack.callback(started.wait)
        self._stack.callback(started.kill)


def answers(url: str) -> bool:
    """Whether an address answers 200."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False
