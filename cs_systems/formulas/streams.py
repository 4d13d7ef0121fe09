"""Discrete simulation of work on several streams: start and end of each task.

As on a GPU, each stream runs its tasks one after the other in the order in which they were added, and a task waits for
the tasks that it depends on. Streams do not slow each other down.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """Task of a stream; `after` holds the numbers of earlier tasks that must have ended."""

    stream: str
    name: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class Timeline:
    """Tasks in the order in which they were added, with start and end in seconds from the first start."""

    tasks: list[Task] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    _free_s: dict[str, float] = field(default_factory=dict)

    def add(self, stream: str, name: str, seconds: float, *after: int) -> int:
        """Add a task and return its number.

        Raises:
            ValueError: the duration is negative, or a dependency has not been added yet.
        """
        if not seconds >= 0:
            raise ValueError(f"task {name} takes {seconds} s; give a duration of at least 0")
        if unknown := [number for number in after if not 0 <= number < len(self.tasks)]:
            remedy = "give the number that add returned for an earlier task"
            raise ValueError(f"task {name} waits for task {unknown[0]}, which does not exist; {remedy}")
        begin = max([self._free_s.get(stream, 0.0), *(self.ends_s[number] for number in after)])
        self.tasks.append(Task(stream, name, seconds, after))
        self.starts_s.append(begin)
        self.ends_s.append(begin + seconds)
        self._free_s[stream] = begin + seconds
        return len(self.tasks) - 1

    @property
    def makespan_s(self) -> float:
        """End of the last task, in seconds."""
        return max(self.ends_s, default=0.0)

    def busy_s(self, stream: str) -> float:
        return sum(task.seconds for task in self.tasks if task.stream == stream)

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(task.stream for task in self.tasks))
