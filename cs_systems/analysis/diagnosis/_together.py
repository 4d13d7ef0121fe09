"""Answer about several files of a kind, such as the snapshots of all ranks, from the answer about each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cs_systems.analysis.diagnosis._findings import Answer, Diagnosis, ranked


def together(answers: Mapping[str, Answer], kind: str) -> Answer:
    """Return each cause once, from the file where it takes the most, with the number of files that have it.

    Args:
        answers: name → its answer, such as "rank 3".
        kind: the plural noun for the names, such as "ranks".
    """
    by_code: dict[str, list[tuple[str, Diagnosis]]] = {}
    for name, answer in answers.items():
        for one in answer.diagnoses:
            by_code.setdefault(one.code, []).append((name, one))
    told = []
    for alike in by_code.values():
        name, worst = max(alike, key=lambda pair: (pair[1].now, pair[1].share))
        others = f"; {len(alike)} of {len(answers)} {kind} have this cause" if len(alike) > 1 else " alone"
        told.append(replace(worst, cells=f"{name}{others}"))
    asked: dict[str, list[str]] = {}
    for name, answer in answers.items():
        for text in answer.unknowns:
            asked.setdefault(text, []).append(name)
    unknowns = tuple(f"{text} ({', '.join(names)})" for text, names in asked.items())
    judged = next((answer.judged for answer in answers.values() if answer.judged), "")
    return Answer(ranked(told), unknowns, f"{judged} of any of the {len(answers)} {kind}" if judged else "")
