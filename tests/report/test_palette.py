"""Colours: told apart by every eye, and standing out from the page; the look of a name is the same everywhere."""

from itertools import combinations, product

import numpy as np
import pytest

from cs_systems.analysis.attribution.kernel_families import FAMILIES
from cs_systems.analysis.memory.categories import CATEGORIES
from cs_systems.report import palette
from tests.report import colors

LEAST_DISTANCE, LEAST_ACROSS, LEAST_CONTRAST, TEXT_CONTRAST = 15, 10, 3, 4.5
MODES = {"light": 0, "dark": 1}
SIDE_BY_SIDE = (*palette.GROUPS, dict(zip("abcdefgh", palette.SERIES, strict=True)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", SIDE_BY_SIDE, ids=lambda group: next(iter(group)))
@pytest.mark.parametrize("eyes", [None, *colors.DEFICIENCIES])
def test_adjacent_colors_are_distinct_for_color_blind_readers(
    group: dict[str, palette.Paint], mode: str, eyes: str
) -> None:
    seen = {n: colors.seen(colors.from_hex(palette.SHADES[p.hue][MODES[mode]]), eyes) for n, p in group.items()}
    pairs = [pair for pair in combinations(seen, 2) if not {group[name].hue for name in pair} <= {*palette.FILLS}]
    near = {f"{a} and {b}": float(colors.distance(seen[a], seen[b])) for a, b in pairs}
    assert {pair: value for pair, value in near.items() if value < LEAST_DISTANCE} == {}


@pytest.mark.parametrize("mode", MODES)
def test_colors_stand_out_from_the_page(mode: str) -> None:
    pages = [colors.from_hex(shade[MODES[mode]]) for shade in (palette.PAGE, palette.RAISED)]
    drawn = {
        **palette.HUES,
        **palette.PHASE_HUES,
        **palette.GREYS,
        "ink": palette.INK,
        "soft": palette.SOFT,
        "hatch": palette.HATCH,
    }
    for name, shade in drawn.items():
        color = colors.from_hex(shade[MODES[mode]])
        assert colors.contrast(color, pages[0]) >= LEAST_CONTRAST, name
        best = max(colors.contrast(color, colors.from_hex(text)) for text in ("#000000", "#ffffff"))
        assert best >= TEXT_CONTRAST, name
    for name in ("INK", "SOFT"):
        text = colors.from_hex(getattr(palette, name)[MODES[mode]])
        assert all(colors.contrast(text, page) >= TEXT_CONTRAST for page in pages), name
    hatch = colors.from_hex(palette.HATCH[MODES[mode]])
    for fill in palette.FILLS.values():
        assert colors.contrast(hatch, colors.from_hex(fill[MODES[mode]])) >= LEAST_CONTRAST


@pytest.mark.parametrize("mode", MODES)
def test_a_color_of_families_phases_and_layers_has_one_meaning(mode: str) -> None:
    """Names of two palettes differ for normal eyes, except where they mean the same or that nothing is known."""
    same = {("optimizer", "optimizer"), ("collective", "communication"), ("other", "outside")}
    shown = [
        {name: colors.seen(colors.from_hex(palette.SHADES[look.hue][MODES[mode]])) for name, look in group.items()}
        for group in (palette.FAMILIES, palette.PHASES, palette.LAYERS)
    ]
    for one, other in combinations(shown, 2):
        for a, b in product(one, other):
            assert (a, b) in same or colors.distance(one[a], other[b]) >= LEAST_ACROSS, (a, b)


def test_every_family_and_category_has_a_color_and_hatching() -> None:
    assert set(FAMILIES) == set(palette.FAMILIES)
    assert {name.replace(" ", "-") for name in CATEGORIES} == set(palette.MEMORY)


def test_each_name_has_one_color_and_hatching() -> None:
    for name in {name for group in palette.GROUPS for name in group}:
        assert {group[name] for group in palette.GROUPS if name in group} == {palette.paint(name)}


def test_styles_of_a_group_differ_in_hatching_too() -> None:
    for group in palette.GROUPS:
        for kind in (palette.HUES, palette.FILLS):
            hatches = [look.hatch for look in group.values() if look.hue in kind and look.hatch]
            assert len({*hatches}) == len(hatches)


def test_distance_agrees_with_published_pairs() -> None:
    """The pairs exercise the hue rotation in blue, a large distance, and near-neutral colours."""
    pairs = np.array(
        [
            [(50, 2.6772, -79.7751), (50, 0, -82.7485)],
            [(50, 2.5, 0), (73, 25, -18)],
            [(2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514)],
        ]
    )
    assert colors.distance(pairs[:, 0], pairs[:, 1]) == pytest.approx([2.0425, 27.1492, 0.9082], abs=1e-4)
    white, black = np.ones(3), np.zeros(3)
    assert colors.contrast(white, black) == pytest.approx(21)
    for eyes in colors.DEFICIENCIES:
        assert colors.seen(np.full(3, 0.5), eyes) == pytest.approx(colors.seen(np.full(3, 0.5)), abs=0.1), "greys stay"
