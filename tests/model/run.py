"""Walk: `python -m tests.model.run --seeds 0:10000`, and `--seed 17 --trace` to replay one exactly.

Owns: one walk from start to verdict, shrinking, and the command line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import Pool
from typing import Final

from tests.model import faults
from tests.model.check import ViolationError
from tests.model.faults import Mix, Scenario, draw, without
from tests.model.rules import Rules
from tests.model.world import World

SETTLE_WITHIN: Final = 120.0
"""Virtual seconds in which a job must be back at work once nothing goes wrong any more."""
REAL: Final = Rules()


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What became of one seed. `kind` is None where nothing broke."""

    seed: int
    scenario: Scenario
    kind: str | None
    text: str
    generations: int
    events: int
    lines: tuple[str, ...] = ()


def walk(seed: int, scenario: Scenario, rules: Rules = REAL, *, tracing: bool = False) -> Walk:
    """Run one walk to its verdict."""
    world = World(seed, scenario.nodes, scenario.target, total=scenario.total, rules=rules, exact=scenario.exact, tracing=tracing, shared=scenario.shared)
    world.must_not_fail = scenario.must_not_fail
    world.stuck_for_good, world.cut_for_good = "stuck" in scenario.keep, "cut" in scenario.keep
    kind, text = None, ""
    try:
        _walk(world, scenario)
    except ViolationError as error:
        kind, text = error.kind, str(error)
        world.say("", f"!! {error}")
    return Walk(
        seed=seed, scenario=scenario, kind=kind, text=text, generations=len(world.check.generations), events=world.handled, lines=tuple(world.lines or ())
    )  # fmt: skip


def _walk(world: World, scenario: Scenario) -> None:
    for name, at in zip(scenario.nodes, scenario.starts, strict=True):
        world.at(at, faults.start, world, name)
    faults.schedule(world, scenario)
    world.run_until(scenario.span)
    faults.heal(world, scenario.keep)
    good, missing, end = 0, "", world.now + SETTLE_WITHIN
    while world.now < end:
        world.run_until(world.now + 1.0)
        missing = world.check.settled() or ""
        good = 0 if missing else good + 1
        if good == 2:
            return
        faults.revive(world)
    raise ViolationError("no_progress", f"{SETTLE_WITHIN:g} s after the last fault: {missing}")


def shrink(broken: Walk, rules: Rules = REAL) -> Walk:
    """Take faults away as long as the same kind of thing still breaks."""
    best = broken
    again = True
    while again:
        again = False
        for index in range(len(best.scenario.faults)):
            tried = walk(best.seed, without(best.scenario, index), rules)
            if tried.kind == best.kind:
                best, again = tried, True
                break
    return walk(best.seed, best.scenario, rules, tracing=True)


def describe(broken: Walk) -> str:
    """A failing walk for people."""
    one = broken.scenario
    head = [
        f"seed {broken.seed}: {broken.text}",
        (f"mix {one.mix}, nodes {one.nodes} starting at {', '.join(f'{at:.2f}' for at in one.starts)}, at least {one.target.min_nodes}, "
        f"at most {one.target.limit}, {one.target.max_restarts} restarts, {one.total} steps, {one.span:.1f} s"),
        *(f"  {fault}" for fault in one.faults),
    ]
    return "\n".join([*head, *broken.lines])


def find(seeds: Iterable[int], mix: Mix | str, rules: Rules = REAL, kinds: set[str] | None = None) -> tuple[Walk | None, int]:
    """The first walk that breaks (in one of these ways), and how many it took."""
    count = 0
    for seed in seeds:
        count += 1
        scenario = draw(seed, mix) if isinstance(mix, str) else draw(seed, "it", mixes={"it": mix})
        done = walk(seed, scenario, rules)
        if done.kind and (kinds is None or done.kind in kinds):
            return done, count
    return None, count


def _chunk(job: tuple[int, int, str | None, tuple[int, int] | None, int]) -> tuple[int, int, int, float, list[int], Counter[str]]:
    low, high, mix, nodes, limit = job
    began, broken, kinds, generations, events = time.process_time(), [], Counter[str](), 0, 0
    for seed in range(low, high):
        done = walk(seed, _scenario(seed, mix, nodes, limit))
        generations += done.generations
        events += done.events
        if done.kind:
            broken.append(seed)
            kinds[done.kind] += 1
    return high - low, generations, events, time.process_time() - began, broken, kinds


def _scenario(seed: int, mix: str | None, nodes: tuple[int, int] | None, limit: int) -> Scenario:
    scenario = draw(seed, mix, nodes=nodes)
    return replace(scenario, faults=scenario.faults[:limit]) if limit >= 0 else scenario


def _range(text: str, what: type[int] = int) -> tuple[int, int]:
    for mark in ("..", ":"):
        if mark in text:
            low, high = text.split(mark)
            return what(low), what(high)
    return what(text), what(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.model.run", description="walk the protocol at random and look for broken rules")
    parser.add_argument("--seeds", type=_range, default=(0, 1000), metavar="A:B")
    parser.add_argument("--seed", type=int, help="one only")
    parser.add_argument("--nodes", type=_range, metavar="2..4")
    parser.add_argument("--steps", type=int, default=-1, help="faults of a walk at most")
    parser.add_argument("--mix", choices=sorted(faults.MIXES))
    parser.add_argument("--trace", action="store_true", help="print the walk, whether it breaks or not")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", type=int, default=1, help="failing walks to print in full")
    args = parser.parse_args(argv)
    if args.seed is not None:
        done = walk(args.seed, _scenario(args.seed, args.mix, args.nodes, args.steps), tracing=True)
        print(describe(done) if args.trace or done.kind else f"seed {args.seed}: nothing broke")
        return int(done.kind is not None)
    return _many(args)


def _many(args: argparse.Namespace) -> int:
    low, high = args.seeds
    size = max(50, min(1000, (high - low) // (20 * args.jobs)))
    jobs = [(start, min(start + size, high), args.mix, args.nodes, args.steps) for start in range(low, high, size)]
    walks, generations, events, seconds, broken, kinds = 0, 0, 0, 0.0, [], Counter[str]()
    began = said = time.monotonic()
    with Pool(args.jobs) as pool:
        results = pool.imap(_chunk, jobs) if args.jobs > 1 else map(_chunk, jobs)
        for count, formed, handled, took, bad, how in results:
            walks, generations, events, seconds = walks + count, generations + formed, events + handled, seconds + took
            broken += bad
            kinds += how
            if time.monotonic() - said > 5 or walks == high - low:
                said = time.monotonic()
                print(f"{walks} walks, {len(broken)} broken, {walks / max(seconds, 1e-9):.0f} a second of CPU, {said - began:.0f} s", flush=True)
    print(f"{walks} walks of {generations / max(walks, 1):.1f} generations and {events / max(walks, 1):.0f} events; broken: {dict(kinds) or 0}")
    for seed in broken[: args.show]:
        done = walk(seed, _scenario(seed, args.mix, args.nodes, args.steps), tracing=True)
        print(describe(done if args.no_shrink else shrink(done)))
    if broken:
        print(f"failing seeds: {' '.join(map(str, broken[:40]))}{' …' if len(broken) > 40 else ''}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
