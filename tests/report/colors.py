"""Colour arithmetic: contrast, CIEDE2000, and colours as people with a colour deficiency see them.

Colours are sRGB arrays of shape (..., 3) with values from 0 to 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # a float array; numpy's own type needs its mypy plug-in

# Full deficiencies, as matrices of linear sRGB.
# Source: Machado, Oliveira and Fernandes (2009),
# A physiologically-based model for simulation of color vision deficiency.
DEFICIENCIES = {
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
_XYZ = np.array(
    ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
)


def from_hex(text: str) -> Array:
    """Return the colour of `#rrggbb`."""
    return np.array([int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)])


def linear(color: Array) -> Array:
    """Return the colour in linear sRGB."""
    return np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)


def luminance(color: Array) -> Array:
    return linear(color) @ _XYZ[1]


def contrast(a: Array, b: Array) -> Array:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG 2 defines it."""
    low, high = np.sort(np.stack(np.broadcast_arrays(luminance(a), luminance(b))), axis=0)
    return (high + 0.05) / (low + 0.05)


def seen(color: Array, deficiency: str | None = None) -> Array:
    """Return the colour in CIELAB, as seen with normal vision or a full deficiency."""
    light = linear(color)
    if deficiency:
        light = np.clip(light @ np.array(DEFICIENCIES[deficiency]).T, 0, 1)
    relative = light @ _XYZ.T / _XYZ.sum(axis=1)  # to white
    x, y, z = np.moveaxis(
        np.where(relative > 216 / 24389, np.cbrt(relative), (24389 / 27 * relative + 16) / 116), -1, 0
    )
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def distance(a: Array, b: Array) -> Array:
    """Return the distance of two CIELAB colours by CIEDE2000 (ISO/CIE 11664-6), with all weights 1."""
    (l_1, a_1, b_1), (l_2, a_2, b_2) = (np.moveaxis(lab, -1, 0) for lab in (a, b))
    mean = (np.hypot(a_1, b_1) + np.hypot(a_2, b_2)) / 2
    stretch = 1.5 - 0.5 * _saturation(mean)
    c_1, c_2 = np.hypot(stretch * a_1, b_1), np.hypot(stretch * a_2, b_2)
    h_1, h_2 = (np.degrees(np.arctan2(*pair)) % 360 for pair in ((b_1, stretch * a_1), (b_2, stretch * a_2)))
    grey = c_1 * c_2 == 0
    turn = np.where(grey, 0, (h_2 - h_1 + 180) % 360 - 180)
    hue = np.where(grey, h_1 + h_2, h_1 + turn / 2) % 360
    lightness, chroma = (l_1 + l_2) / 2, (c_1 + c_2) / 2
    tint = sum(
        weight * np.cos(np.radians(times * hue + shift))
        for weight, times, shift in ((1, 0, 0), (-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    )
    by_lightness = (l_2 - l_1) / (1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2))
    by_chroma = (c_2 - c_1) / (1 + 0.045 * chroma)
    by_hue = 2 * np.sqrt(c_1 * c_2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * tint)
    blue = np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2)))) * 2 * _saturation(chroma)
    return np.sqrt(by_lightness**2 + by_chroma**2 + by_hue**2 - blue * by_chroma * by_hue)


def _saturation(chroma: Array) -> Array:
    return np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
