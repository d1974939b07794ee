"""What the time of an agent went into: every moment in exactly one activity.

Owns: the marks at which one activity gave way to another, and their sums. Must not: read a clock, or know why anything happens.

What workers say of their steps arrives a second and more after it was so. Therefore the newest seconds (`lag`) are not summed up yet, and marks may
still be set among them. What has been summed up never changes again: the sums only grow, and together they are the time up to `lag` ago.
"""

from __future__ import annotations

from bisect import bisect_right

from elasticd.observability.report import Activity


class Timeline:
    """See the module.

    Args:
        at: when it begins, seconds on the caller's clock, as all times here.
        activity: with which.
        lag: for how long a mark may still be set in hindsight; one that comes later counts from there on.
    """

    def __init__(self, at: float, activity: Activity, lag: float) -> None:
        self._lag = lag
        self._marks: list[tuple[float, Activity]] = [(at, activity)]  # ascending; the first one is where the sums end
        self._seconds = dict.fromkeys(Activity, 0.0)

    @property
    def activity(self) -> Activity:
        """The newest."""
        return self._marks[-1][1]

    def mark(self, at: float, activity: Activity) -> None:
        """From `at` on it is this one, until the next mark."""
        at = max(at, self._marks[0][0])
        self._marks.insert(bisect_right(self._marks, at, key=lambda mark: mark[0]), (at, activity))

    def seconds(self, now: float) -> dict[Activity, float]:
        """The sums, up to `lag` before now."""
        self._settle(now - self._lag)
        return dict(self._seconds)

    def close(self, now: float) -> None:
        """Sum everything up: nothing more will be known."""
        self._lag = 0.0
        self._settle(now)

    def _settle(self, until: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= until:
            (began, activity), (ended, _next) = self._marks[:2]
            self._seconds[activity] += ended - began
            del self._marks[0]
        began, activity = self._marks[0]
        if until > began:
            self._seconds[activity] += until - began
            self._marks[0] = (until, activity)
