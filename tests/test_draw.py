"""Views drawn all at once are those drawn one by one, to the last bit."""

from __future__ import annotations

import pytest

from testtime.images.draw import draw, entries
from testtime.images.views import sample_views
from testtime.types import InputError


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize("extent", [(500, 375), (375, 500), (1, 1), (7, 300), (33, 2), (224, 224), (4000, 3000)])
def test_draw_is_that_of_sample_views(extent: tuple[int, int], augmix: bool) -> None:
    for seed, index in ((0, 0), (1, 4711), (2**64 - 1, 2**64 - 1)):
        options = dict(seed=seed, index=index, augmix=augmix)
        expected = sample_views(extent, 64, 224, **options)
        assert entries(draw(extent, 64, 224, **options)) == expected


@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.5, 0.5), (0.01, 0.02)])
@pytest.mark.parametrize("size", [32, 336])
def test_draw_is_that_of_sample_views_at_other_scales_and_sizes(scale: tuple[float, float], size: int) -> None:
    options = dict(seed=5, index=6, augmix=True, scale=scale)
    assert entries(draw((300, 200), 200, size, **options)) == sample_views((300, 200), 200, size, **options)


def test_image_without_random_views_has_nothing_drawn() -> None:
    drawn = draw((30, 20), 1, 32, seed=0, index=0, augmix=True)
    assert len(drawn) == 0 and entries(drawn) == []


@pytest.mark.parametrize("wrong", [{"count": 0}, {"seed": -1}, {"index": 2**64}, {"scale": (0.0, 1.0)}])
def test_what_sample_views_refuses_is_refused(wrong: dict) -> None:
    options: dict = dict(count=4, seed=0, index=0) | wrong
    with pytest.raises(InputError, match="must be"):
        draw((30, 20), options.pop("count"), 32, **options)
