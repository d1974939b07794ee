"""Watching a run from its start to its end, and ending it when asked.

Owns: the loop of `elasticctl run`: what is new goes to progress and screen, signals become orderly or disorderly ends. Must not: start anything.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Final

from elasticd.cli.follow import AgentLogs, WorkerOutput
from elasticd.cli.options import Show
from elasticd.cli.progress import Notice, Weight
from elasticd.cli.summary import RunOutcome, RunResult
from elasticd.policy.settings import EXIT_NO_PROGRESS, EXIT_SAME_AGAIN
from elasticd.rendezvous.status import job_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticd.cli.follow import OutputLine
    from elasticd.cli.interrupts import Interrupts
    from elasticd.cli.localetcd import LocalEtcd
    from elasticd.cli.localnodes import Death, LocalNodes
    from elasticd.cli.options import RunOptions
    from elasticd.cli.progress import Progress
    from elasticd.cli.screen import Screen
    from elasticd.cli.store import JobWatcher, Look

_EVERY: Final = 0.1
"""Seconds between two rounds when nothing ends and no signal comes."""
_STOP_SLACK: Final = 15.0
"""Seconds beyond the workers' grace that an orderly end may take before it becomes a kill."""
_TARGET_WITHIN: Final = 3.0
"""Seconds until the wish to stop must be in etcd; else the agents are told directly."""
_GUESTS_WITHIN: Final = 5.0
"""Seconds that nodes from elsewhere have to see the job's end in our etcd before it goes."""


class Follower:
    """See the module. Everything happens in the caller's thread, the main one.

    Args:
        etcd: the local one, None if the job lives elsewhere.
        interrupts: entered already.
    """

    def __init__(
        self,
        options: RunOptions,
        *,
        nodes: LocalNodes,
        logs: AgentLogs,
        watcher: JobWatcher,
        etcd: LocalEtcd | None,
        progress: Progress,
        screen: Screen,
        interrupts: Interrupts,
    ) -> None:
        self._options = options
        self._nodes = nodes
        self._logs = logs
        self._watcher = watcher
        self._etcd = etcd
        self._progress = progress
        self._screen = screen
        self._interrupts = interrupts
        self._output = WorkerOutput(all_ranks=options.show is Show.ALL)
        self._look: Look | None = None
        self._deaths: list[Death] = []
        self._asked: list[signal.Signals] = []
        self._asked_at = 0.0
        self._told_nodes = False
        self._killed = False

    def to_the_end(self) -> RunOutcome:
        """Follow until every node has ended, and say how the run ended."""
        self._interrupts.collect()
        while True:
            self._nodes.wait(_EVERY, self._interrupts.fd)
            self._round()
            if not self._nodes.alive:
                break
        self._last_words()
        return self._outcome()

    # --- one round -------------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        # Deaths are noted before the logs are read: what an agent wrote at its end is then read before its death is judged.
        deaths = self._nodes.deaths()
        self._take_in()
        self._say_deaths(deaths)
        for number in self._interrupts.take():
            self._asked_to_end(number)
        self._press_on()
        if self._etcd is not None and self._nodes.alive and (said := self._etcd.revive()):
            self._say(said, Weight.WARNING)
        self._screen.draw(self._progress)

    def _take_in(self) -> None:
        for event in self._logs.events():
            self._screen.event(event)
            if event.name == "workers_started":
                self._output.started(event)
            self._say_all(self._progress.on_event(event))
        self._pass_on(self._output.lines())
        self._look_at(self._watcher.look)

    def _look_at(self, look: Look) -> None:
        if look is self._look:
            return
        self._look = look
        self._say_all(self._progress.on_store(look.problem))
        if look.view is not None and not look.problem:
            self._say_all(self._progress.on_status(job_status(look.view, cluster=self._options.cluster, job=self._options.job)))

    def _pass_on(self, lines: Sequence[OutputLine]) -> None:
        for line in lines:
            self._progress.on_output(line)
            if self._options.show is not Show.NONE:
                self._screen.output(line)

    def _say_deaths(self, deaths: Sequence[Death]) -> None:
        self._deaths += deaths
        for death in deaths:
            if death.node in self._progress.ends or self._killed:
                continue
            left = len(self._nodes.alive)
            rest = f"; {left} of this machine's nodes go on" if left else ""
            self._say(f"the agent of {death.node} has died ({death}){rest}", Weight.ERROR)

    # --- ending it -------------------------------------------------------------------------------------------------------

    def _asked_to_end(self, number: signal.Signals) -> None:
        self._asked.append(number)
        if len(self._asked) > 1:
            self._kill("killing everything")
            return
        self._asked_at = time.monotonic()
        grace = f"workers have {self._options.stop_grace:g} s"
        if self._etcd is not None:
            self._say(f"{number.name}: stopping the job in order, {grace}; another Ctrl-C kills it at once", Weight.WARNING)
            self._watcher.stop_job(f"stopped by {number.name} to elasticctl run")
        else:
            self._say(f"{number.name}: leaving the job in order, it goes on elsewhere, {grace}; another Ctrl-C kills this node at once", Weight.WARNING)
            self._tell_nodes()

    def _press_on(self) -> None:
        """See that an end that was asked for comes."""
        if not self._asked or self._killed:
            return
        waited = time.monotonic() - self._asked_at
        if waited > self._options.stop_grace + _STOP_SLACK:
            self._kill(f"not over after {waited:.0f} s: killing everything")
        elif not self._told_nodes and self._must_tell_nodes(waited):
            self._tell_nodes()

    def _must_tell_nodes(self, waited: float) -> bool:
        """Whether the wish in etcd is not enough: it cannot be written, or no generation has formed that could be stopped."""
        if not self._watcher.stop_written:
            return waited > _TARGET_WITHIN
        view = self._look.view if self._look else None
        return view is None or view.generation is None

    def _tell_nodes(self) -> None:
        self._told_nodes = True
        self._nodes.signal(signal.SIGTERM)

    def _kill(self, why: str) -> None:
        if not self._killed:
            self._killed = True
            self._say(why, Weight.ERROR)
            self._nodes.kill()

    # --- the end ---------------------------------------------------------------------------------------------------------

    def _last_words(self) -> None:
        """Read what came in after the last round, and let nodes from elsewhere see the end."""
        self._take_in()
        self._pass_on(self._output.rest())
        self._logs.close()
        if self._killed:
            return
        since = time.monotonic()
        self._watcher.wake()
        while time.monotonic() - since < _GUESTS_WITHIN and not self._interrupts.take():
            look = self._watcher.look
            if look.at > since and (look.problem or not self._guests(look)):
                break
            self._nodes.wait(_EVERY, self._interrupts.fd)
        self._look_at(self._watcher.look)

    def _guests(self, look: Look) -> bool:
        """Whether nodes of other machines still need the etcd that ends with us."""
        return self._etcd is not None and look.view is not None and bool(look.view.members.keys() - set(self._nodes.nodes))

    def _outcome(self) -> RunOutcome:
        ends = {end.result: end.reason for end in self._progress.ends.values()}
        if "succeeded" in ends:
            return RunOutcome(result=RunResult.SUCCEEDED, reason=ends["succeeded"], exit_code=0)
        if self._asked:
            number = self._asked[0]
            how = "killed" if self._killed else "stopped in order" if self._etcd is not None else "left in order"
            return RunOutcome(result=RunResult.INTERRUPTED, reason=f"{number.name}: {how}", exit_code=128 + number)
        bad = [death for death in self._deaths if death.code != 0]
        if "failed" not in ends and not bad:
            reason = ends.get("stopped") or ends.get("left") or "every agent has ended"
            return RunOutcome(result=RunResult.STOPPED, reason=reason, exit_code=0)
        refused = next((death for death in bad if death.said), None)
        if refused is not None:
            return RunOutcome(result=RunResult.FAILED, reason=refused.said, exit_code=refused.code)
        reason = ends.get("failed") or "; ".join(f"the agent of {death.node} has died ({death})" for death in bad)
        own = (death.code for death in bad if death.code in (EXIT_NO_PROGRESS, EXIT_SAME_AGAIN))
        return RunOutcome(result=RunResult.FAILED, reason=reason, exit_code=next(own, 1))

    def _say(self, text: str, weight: Weight) -> None:
        self._screen.notice(Notice(text=text, weight=weight))

    def _say_all(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self._screen.notice(notice)
