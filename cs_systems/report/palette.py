"""Colours of figures and pages by name: `paint("matmul")`, and `css()` for pages.

HUES were found by a search: every two are told apart by normal and colour-deficient eyes, and each stands out from the
page. There are no more such hues, so less important names share a grey and differ in hatching. Phases and layers have
shades of their own, found in the same way among themselves, and as far as possible from HUES: a colour has one meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Shade(NamedTuple):
    """Colour on a white page and on the dark one."""

    light: str
    dark: str


class Paint(NamedTuple):
    """Look of a name: a colour of SHADES, and matplotlib's hatch, which distinguishes it without colour."""

    hue: str
    hatch: str = ""

    @property
    def color(self) -> str:
        """Colour on a white page."""
        return SHADES[self.hue].light


HUES = {
    "blue": Shade("#2255cc", "#3579ee"),
    "vermilion": Shade("#fc2500", "#f3832d"),
    "green": Shade("#009955", "#29c388"),
    "pink": Shade("#ee5599", "#cf9db6"),
    "lavender": Shade("#a07cf0", "#b9a8ff"),
    "purple": Shade("#770066", "#b54a99"),
    "red": Shade("#881100", "#d33424"),
    "black": Shade("#303131", "#f4f4f4"),
    "grey": Shade("#666666", "#83807d"),
}
PHASE_HUES = {
    "cyan": Shade("#069cbc", "#17f1fc"),
    "olive": Shade("#857b30", "#e9cf0e"),
    "teal": Shade("#0b5f4a", "#d8feb5"),
}
GREYS = {"stone": Shade("#8f939a", "#b9bdc4"), "sage": Shade("#5f7565", "#5d7f71")}  # for layers, in turn
# Near the colour of the page, so that they are always hatched, with HATCH, which stands out from them and the page.
FILLS = {"pale": Shade("#e7e9ec", "#343a43"), "salmon": Shade("#ffa6a6", "#611b1b")}
SHADES = HUES | PHASE_HUES | GREYS | FILLS
HATCH = Shade("#565d67", "#a9b1bb")
PAGE = Shade("#ffffff", "#15181c")
RAISED = Shade("#f5f6f8", "#1e2228")  # behind headings and fields
INK = Shade("#1e2227", "#e3e6ea")  # text
SOFT = Shade("#5b636e", "#9aa3ae")  # less important text and lines

UNATTRIBUTED = Paint("pale", "\\\\\\")
FAMILIES = {
    "matmul": Paint("blue"),
    "attention": Paint("vermilion", "///"),
    "softmax": Paint("pink", "..."),
    "elementwise": Paint("green", "\\\\\\"),
    "reduction": Paint("lavender", "|||"),
    "norm": Paint("black"),
    "copy": Paint("grey", "---"),
    "collective": Paint("red", "xxx"),
    "optimizer": Paint("purple", "+++"),
    "other": Paint("pale", "///"),
}
PHASES = {
    "forward": Paint("cyan"),
    "loss": Paint("olive", "..."),
    "backward": Paint("teal", "\\\\\\"),
    "optimizer": FAMILIES["optimizer"],
    "communication": FAMILIES["collective"],
    "outside": Paint("pale", "///"),
}
RANKS = PHASES | {"waiting": Paint("salmon", "...")}
MEMORY = {
    "parameters": Paint("blue"),
    "optimizer-state": FAMILIES["optimizer"],
    "gradients": Paint("vermilion", "///"),
    "activations": Paint("green", "\\\\\\"),
    "temporaries": Paint("pink", "..."),
    "workspaces": Paint("lavender", "|||"),
    "before-recording": Paint("grey", "---"),
    "unknown": Paint("black"),
}
LAYERS = {"even": Paint("stone"), "odd": Paint("sage")}
# names that can appear next to each other; phases outside of PHASES are drawn as unattributed
GROUPS: tuple[Mapping[str, Paint], ...] = tuple(
    group | {"unattributed": UNATTRIBUTED} for group in (FAMILIES, PHASES, RANKS, MEMORY, LAYERS)
)
SERIES = tuple(map(Paint, ("blue", "vermilion", "green", "purple", "lavender", "red", "pink", "grey")))


def paint(name: str) -> Paint:
    """Return the look of a family, a phase, a category of memory or a layer; other names raise StopIteration."""
    return next(group[name] for group in GROUPS if name in group)


def css() -> str:
    """Return the colours as CSS custom properties: of each hue and name, and of text on a hue."""
    tones = {**SHADES, "hatch": HATCH, "page": PAGE, "raised": RAISED, "ink": INK, "soft": SOFT}
    named = {name: look.hue for group in GROUPS for name, look in group.items()}
    names = "".join(f"--{name}:var(--{hue});" for name, hue in named.items())
    light, dark = ("".join(f"--{name}:{shade[mode]};" for name, shade in tones.items()) for mode in (0, 1))
    return f":root{{{light}{names}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
