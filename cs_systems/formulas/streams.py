"""When work on several streams begins and ends: a discrete simulation.

As on a GPU: each stream does its tasks one after the other in the order in which they were given, and a task waits for
those that it names. Streams do not slow each other down.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """`after`: the numbers of tasks given before it that must have ended."""

    stream: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class Timeline:
    """Tasks in the order in which they are given, each with its start and end, in seconds from the first."""

    tasks: list[Task] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    _free_s: dict[str, float] = field(default_factory=dict)

    def add(self, stream: str, name: str, seconds: float, *after: int) -> int:
        """Give one more task; returns its number. Raises ValueError for a time below 0 and a task not given yet."""
        if not seconds >= 0 or any(not 0 <= number < len(self.tasks) for number in after):
            raise ValueError(f"{name} takes {seconds} s after {after}: it needs 0 s or more, after tasks given before")
        begin = max([self._free_s.get(stream, 0.0), *(self.ends_s[number] for number in after)])
        self.tasks.append(Task(stream, name, seconds, after))
        self.starts_s.append(begin)
        self.ends_s.append(begin + seconds)
        self._free_s[stream] = begin + seconds
        return len(self.tasks) - 1

    @property
    def makespan_s(self) -> float:
        """When the last task ends."""
        return max(self.ends_s, default=0.0)

    def busy_s(self, stream: str) -> float:
        return sum(task.seconds for task in self.tasks if task.stream == stream)

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(task.stream for task in self.tasks))
