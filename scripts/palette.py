"""Search for the hues of `cs_systems/report/palette.py`, near the colours wished for.

    python -m scripts.palette        # a minute; prints name, colour on white, colour on the dark page

Every two hues are at least DISTANCE apart to normal, deuteranopic, protanopic and tritanopic eyes, and each has at
least CONTRAST to its page. A random search on a coarse grid ends at different places; the best of several is refined.
"""

from __future__ import annotations

import numpy as np

from scripts._colors import Array, contrast, distance, from_hex, least_distance, seen, to_hex

DISTANCE, CONTRAST = 15.2, 3.05
PAGES = {"light": "#ffffff", "dark": "#1e2228"}
WISHES = {
    "blue": ("#2255cc", "#4a7fe8"),
    "vermilion": ("#e05a00", "#f08030"),
    "green": ("#009955", "#20c080"),
    "pink": ("#ee5599", "#ff9ac8"),
    "lavender": ("#a07cf0", "#b9a8ff"),
    "purple": ("#770066", "#b84aa0"),
    "red": ("#881100", "#d03a2a"),
    "black": ("#30343a", "#f4f4f4"),
    "grey": ("#6a6f78", "#80868f"),
}
ATTEMPTS, ROUNDS = 40, 30
REFINEMENTS = ((48, 12), (24, 6), (24, 6), (12, 3), (12, 3))  # (reach, step) of finer grids, in 1/255


def candidates(page: str) -> Array:
    """Return the colours of a regular grid that have the contrast."""
    steps = np.arange(0, 256, 17) / 255
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, 3)
    return grid[contrast(grid, from_hex(page)) >= CONTRAST]


def search(colors: Array, wishes: Array, random: np.random.Generator) -> Array:
    """Return the colours nearest to the wishes that keep the distance from each other."""
    far = distance(seen(colors)[:, None], seen(wishes)[None])
    near = np.stack([np.maximum(0, DISTANCE - least_distance(color, colors)) for color in colors])
    best, least = None, np.inf
    for _ in range(ATTEMPTS):
        chosen = [int(random.choice(np.argsort(column)[:200])) for column in far.T]
        for number in range(ROUNDS * len(wishes)):
            at, heat = number % len(wishes), 3 * max(0.0, 1 - number / (ROUNDS * len(wishes) - 50))
            others = [c for i, c in enumerate(chosen) if i != at]
            cost = far[:, at] + 20 * near[:, others].sum(axis=1) + heat * random.gumbel(size=len(colors))
            chosen[at] = int(cost.argmin())
        total = (
            sum(far[c, at] for at, c in enumerate(chosen))
            + 1000 * near[np.ix_(chosen, chosen)][np.triu_indices(len(chosen), 1)].sum()
        )
        if total < least:
            best, least = chosen, total
    return colors[best]


def refined(chosen: Array, wishes: Array, page: str) -> Array:
    """Return the chosen colours, each moved nearer to its wish on finer grids around both."""
    chosen = chosen.copy()
    for reach, step in REFINEMENTS:
        by = np.arange(-reach, reach + 1, step) / 255
        around = np.stack(np.meshgrid(by, by, by, indexing="ij"), -1).reshape(-1, 3)
        for at, wish in enumerate(wishes):
            near = np.round(np.clip(np.concatenate([chosen[at] + around, wish + around]), 0, 1) * 255) / 255
            near = near[contrast(near, from_hex(page)) >= CONTRAST]
            cost = distance(seen(near), seen(wish))
            for other in np.delete(chosen, at, axis=0):
                cost += 20 * np.maximum(0, DISTANCE - least_distance(near, other))
            chosen[at] = near[cost.argmin()]
    return chosen


def main() -> None:
    found = []
    for number, page in enumerate(PAGES.values()):
        wishes = np.stack([from_hex(wish[number]) for wish in WISHES.values()])
        found.append(map(to_hex, refined(search(candidates(page), wishes, np.random.default_rng(0)), wishes, page)))
    for row in zip(WISHES, *found, strict=True):
        print(*row)


if __name__ == "__main__":
    main()
