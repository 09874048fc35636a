"""Streams are what their names say, and depend on nothing but the images, the kind and the seed."""

from __future__ import annotations

import pytest
import torch

from testtime.experiments import scenarios
from testtime.experiments.scenarios import FOREIGN, KINDS, Images, Stream, make_stream
from testtime.ops import unit
from testtime.synthetic import toy
from testtime.types import Task

TASK, VIEWS, LABELS = toy(classes=50, images=1500, dim=96)
MANY = Images(TASK, VIEWS[:, :1], LABELS, domains=torch.arange(1500) % 3)
SINGLE = [kind for kind in KINDS if "noise" not in kind]  # the rows of these are of the images


def made(kind: str, images: Images = MANY, seed: int = 1) -> Stream:
    stream = make_stream(kind, images, seed)
    assert isinstance(stream, Stream), stream
    return stream


def _tensor(value: torch.Tensor | int | None) -> torch.Tensor:
    return torch.as_tensor(FOREIGN if value is None else value)


def runs(stream: Stream) -> int:
    """How many runs of one class there are."""
    return 1 + int((stream.labels.diff() != 0).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_depends_on_its_kind_and_seed_alone(kind: str) -> None:
    torch.manual_seed(3)
    one, again, other = made(kind), made(kind), made(kind, seed=2)
    for first, second in zip(one, again, strict=True):
        assert torch.equal(_tensor(first), _tensor(second))
    different = one.views[one.rows], other.views[other.rows]
    assert different[0].shape != different[1].shape or not torch.equal(*different)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_unit_rows_and_labels_are_those_of_the_images(kind: str) -> None:
    stream = made(kind)
    views = stream.views[stream.rows]
    assert torch.allclose(views.norm(dim=2), torch.ones(len(views), 1), atol=1e-5)
    assert len(stream.rows) == len(stream.labels) == len(stream.scored)
    own = (stream.rows < len(LABELS)) & (stream.labels != FOREIGN)
    if kind in SINGLE:
        assert torch.equal(stream.classes[stream.labels[own]], LABELS[stream.rows[own]])


@pytest.mark.parametrize(
    "kind", ["shuffled", "sorted", "burst", *(k for k in KINDS if k.startswith(("Dirichlet", "domains")))]
)
def test_an_order_has_every_image_once(kind: str) -> None:
    assert torch.equal(made(kind).rows.sort().values, torch.arange(len(LABELS)))


def test_sorted_has_one_run_for_each_class_in_a_random_order() -> None:
    stream = made("sorted")
    assert runs(stream) == 50
    assert not torch.equal(stream.labels.unique_consecutive(), torch.arange(50))


def test_a_lower_concentration_is_more_correlated_in_time() -> None:
    mean = {kind: sum(runs(made(kind, seed=seed)) for seed in range(5)) / 5 for kind in KINDS}
    assert mean["shuffled"] > mean["Dirichlet 0.1"] > mean["Dirichlet 0.01"] > mean["Dirichlet 0.001"] > 50


def test_shares_of_a_dirichlet_distribution_have_its_moments() -> None:
    shares = scenarios._dirichlet(0.1, 4000, 5, torch.Generator().manual_seed(0))
    assert torch.allclose(shares.sum(1), torch.ones(4000, dtype=torch.float64))
    assert torch.allclose(shares.mean(0), torch.full((5,), 0.2, dtype=torch.float64), atol=0.02)
    variance = 0.2 * 0.8 / (5 * 0.1 + 1)  # of a share, in theory
    assert torch.allclose(shares.var(0), torch.full((5,), variance, dtype=torch.float64), atol=0.01)
    assert torch.isfinite(scenarios._dirichlet(0.001, 100, 3, torch.Generator().manual_seed(0))).all()


@pytest.mark.parametrize(("kind", "count"), [("1 class", 1), ("2 classes", 2), ("4 classes", 4), ("10% of classes", 5)])
def test_few_classes_are_present_and_all_stay_in_the_task(kind: str, count: int) -> None:
    stream = made(kind)
    present = stream.labels.unique()
    assert len(present) == count and len(stream.classes) == 50
    assert len(stream.rows) == int(torch.isin(LABELS, present).sum())


@pytest.mark.parametrize("imbalance", [10, 50, 100])
def test_a_long_tail_falls_exponentially(imbalance: int) -> None:
    labels = torch.arange(2000) % 10  # 200 of each
    stream = made(
        f"long tail {imbalance}", Images(*toy(classes=10, images=2000)[:1], torch.eye(10)[labels, None], labels)
    )
    counts = stream.labels.bincount().sort(descending=True).values.tolist()
    assert counts == [max(1, round(200 * imbalance ** -(rank / 9))) for rank in range(10)]


def test_domains_in_sequence_come_one_after_another_and_mixed_do_not() -> None:
    assert MANY.domains is not None
    sequence, mixed = (MANY.domains[made(f"domains {kind}").rows] for kind in ("in sequence", "mixed"))
    assert int((sequence.diff() != 0).sum()) == 2 and int((mixed.diff() != 0).sum()) > 500


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_an_open_set_has_its_share_of_foreign_images(share: float) -> None:
    kind = f"open set {share:.0%}"
    held = made(kind)
    foreign = held.labels == FOREIGN
    assert abs(float(foreign.double().mean()) - share) < 0.005 and bool(held.scored.all())
    assert len(held.classes) == 50 - round(share * 50)
    assert not torch.isin(LABELS[held.rows[foreign]], held.classes).any()
    others = unit(torch.randn(80, 1, 96, generator=torch.Generator().manual_seed(0)))
    given = made(kind, MANY._replace(foreign=others))
    assert abs(float((given.labels == FOREIGN).double().mean()) - share) < 0.005 and len(given.classes) == 50
    assert bool((given.rows[given.labels == FOREIGN] >= 1500).all())


def test_one_image_comes_a_thousand_times_and_is_scored_once() -> None:
    stream = made("duplicates")
    counts = stream.rows.bincount()
    assert int(counts.max()) == 1000 and int(counts.sum()) == 2499 and int(stream.scored.sum()) == 1500
    assert torch.equal(stream.rows[stream.scored].sort().values, torch.arange(1500))


def test_a_burst_is_one_long_run_in_the_middle() -> None:
    stream = made("burst")
    change = torch.cat([torch.tensor([-1]), (stream.labels.diff() != 0).nonzero()[:, 0], torch.tensor([1499])])
    longest = int(change.diff().argmax())
    label = stream.labels[change[longest] + 1]
    assert int(change.diff()[longest]) == int((LABELS == label).sum()) > 30
    assert 600 < int(change[longest]) < 800


@pytest.mark.parametrize("count", [10, 50, 200])
def test_short_streams_have_different_images(count: int) -> None:
    rows = made(f"{count} images").rows
    assert len(rows) == len(rows.unique()) == count


def test_noise_grows_along_the_stream() -> None:
    cosine = (made("growing noise").views[:, 0] @ MANY.views[:, 0].T).amax(1)
    assert float(cosine[0]) > 0.9999  # the first has none
    parts = [float(part.mean()) for part in cosine.split(300)]
    assert parts == sorted(parts, reverse=True) and parts[-1] < 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_all_views_of_an_image_pass_together(kind: str) -> None:
    one, several = made(kind), made(kind, MANY._replace(views=VIEWS[:, :3]))
    assert torch.equal(one.rows, several.rows) and torch.equal(one.labels, several.labels)
    views = several.views[several.rows]
    assert views.shape[1:] == (3, 96) and torch.allclose(views.norm(dim=2), torch.ones(len(views), 3), atol=1e-5)
    if kind in SINGLE:
        assert torch.allclose(views[:, 0], one.views[one.rows, 0], atol=1e-5)
        own = several.rows < len(VIEWS)
        assert torch.equal(views[own], VIEWS[several.rows[own], :3])
    if kind.startswith("poisoned"):
        sure, answers = TASK.zero_shot(views[~several.scored]).softmax(-1).max(-1)
        assert bool((answers == several.target).all()) and float(sure.min()) > scenarios.SURE - 1e-4


@pytest.mark.parametrize("kind", ["poisoned 1%", "poisoned 5%", "poisoned 10%", "attacker 5%"])
def test_crafted_features_fool_the_frozen_classifier_just_so(kind: str) -> None:
    stream = made(kind)
    share = float(kind.split()[1].rstrip("%")) / 100
    crafted = ~stream.scored
    assert abs(float(crafted.double().mean()) - share) < 0.005
    assert torch.equal(crafted, stream.rows >= 1500) and bool((stream.labels[crafted] == stream.attacked).all())
    sure, answers = TASK.zero_shot(stream.views[stream.rows[crafted], 0]).softmax(-1).max(-1)
    assert not (answers == stream.attacked).any()
    if kind != "attacker 5%":
        assert bool((answers == stream.target).all())
        assert torch.allclose(sure, torch.full_like(sure, scenarios.SURE), atol=1e-4)
    else:
        assert len(answers.unique()) == 4 and float(sure.min()) < 0.91 and float(sure.max()) > 0.99999
        assert stream.turns is not None and torch.equal(stream.turns, crafted)
        assert len(stream.candidates) == scenarios.CANDIDATES
        assert torch.isin(stream.rows[stream.turns], stream.candidates).all()


@pytest.mark.parametrize(
    ("kind", "classes", "images", "reason"),
    [
        ("shuffled", 1, 20, "two or more classes"),
        ("4 classes", 4, 20, "4 of 4 classes are all"),
        ("10% of classes", 20, 400, "10% of 20 classes are 2"),
        ("50 images", 4, 50, "50 of 50 images are all"),
        ("open set 50%", 3, 20, "fewer than two are left"),
        ("domains mixed", 4, 20, "give a folder of them"),
        ("poisoned 5%", 8, 20, "a class of 5 images or more"),
    ],
)
def test_a_stream_that_cannot_be_made_says_why(kind: str, classes: int, images: int, reason: str) -> None:
    labels = torch.arange(images) % classes
    task = Task(torch.eye(max(classes, 2)), tuple(map(str, range(max(classes, 2)))))
    found = make_stream(kind, Images(task, task.text[labels, None], labels), 1)
    assert isinstance(found, str) and reason in found
