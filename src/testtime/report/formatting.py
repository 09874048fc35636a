"""Numbers and names as the page writes them."""

from __future__ import annotations

import math

from testtime.display import short as short


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 image, 2,465 images.

    >>> count(1, "class"), count(2465, "image")
    ('1 class', '2,465 images')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def signed(points: float) -> str:
    """A change in points with its sign; without a sign if it rounds to zero."""
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


def text_width(label: str) -> float:
    """The approximate width in pixels of a label at 13 px, rather too large than too small."""
    wide, thin = "mwMWGOQ%@…", "iljtf.,:;'|! "
    return sum(12.5 if letter in wide else 5 if letter in thin else 8.3 for letter in label)
