"""Numbers and names as the page writes them."""

from __future__ import annotations

import math


def count(number: int, what: str) -> str:
    """A number of things in words: 1 image, 2,465 images.

    >>> count(1, "class"), count(2465, "image")
    ('1 class', '2,465 images')
    """
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:,} {what}{ending}"


def signed(points: float) -> str:
    """A change in points with its sign; none where it rounds to nothing."""
    text = f"{abs(points):.1f}"
    return text if text == "0.0" else ("+" if points > 0 else "−") + text


def milliseconds(seconds: float, images: int) -> str:
    """Milliseconds per image, as HTML."""
    value = 1000 * seconds / images
    if not math.isfinite(value):
        return "–"
    if 0 < value < 0.01:
        return "&lt;0.01"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def px(value: float) -> str:
    """A length in pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def short(name: str, most: int) -> str:
    """The name, cut off with an ellipsis where it is longer than `most` letters."""
    return name if len(name) <= most else name[: most - 1].rstrip() + "…"


def text_width(label: str) -> float:
    """About as many pixels as a label of 13 px takes, on the generous side."""
    wide, thin = "mwMWGOQ%@…", "iljtf.,:;'|! "
    return sum(12.5 if letter in wide else 5 if letter in thin else 8.3 for letter in label)
