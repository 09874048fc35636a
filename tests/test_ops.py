"""Entropies, confident views, the closed-form gradient and the optimiser."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from testtime import ops
from testtime.ops import AdamW, Objective

DOUBLE = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


# --- entropies ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_is_minus_sum_p_log_p(dtype):
    logits = randn(3, 5, 7, dtype=dtype)
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    assert_close(ops.entropy(logits), -(p * p.log()).sum(-1), "arithmetic")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_the_upper_cholesky_factor_gives_the_matrix_back(size, dtype):
    root = randn(size, size + 3)
    matrix = (root @ root.T / size + torch.eye(size, dtype=DOUBLE)).to(dtype)
    upper = ops.cholesky(matrix.clone())
    assert upper.is_contiguous() and (upper.diagonal() > 0).all() and torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper, matrix)


def test_a_matrix_without_a_cholesky_factor_raises_nothing():
    assert ops.cholesky(-torch.eye(130, dtype=DOUBLE)).shape == (130, 130)


def test_entropy_is_in_nats():
    assert ops.entropy(torch.zeros(8, dtype=DOUBLE)).item() == pytest.approx(math.log(8))


def test_marginal_entropy_is_that_of_the_mean_softmax():
    logits = 3 * randn(6, 9)
    p = logits.softmax(-1).mean(0)
    assert_close(ops.marginal_entropy(logits), -(p * p.log()).sum(), "arithmetic")


def test_marginal_entropy_of_one_row_is_its_entropy():
    logits = randn(1, 9)
    assert_close(ops.marginal_entropy(logits), ops.entropy(logits[0]), "arithmetic")


def test_confident_views_that_disagree_are_uncertain_together():
    logits = torch.tensor([[50.0, 0.0], [0.0, 50.0]], dtype=DOUBLE)
    assert ops.entropy(logits).max() < 1e-15
    assert ops.marginal_entropy(logits).item() == pytest.approx(math.log(2))


any_logits = st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=12)


@given(any_logits)
def test_entropy_lies_between_zero_and_log_classes(values):
    logits = torch.tensor(values, dtype=DOUBLE)
    assert -1e-12 <= ops.entropy(logits).item() <= math.log(len(values)) + 1e-12


@given(any_logits, st.integers(1, 5))
def test_marginal_entropy_lies_between_zero_and_log_classes(values, rows):
    logits = torch.stack([torch.tensor(values, dtype=DOUBLE).roll(r) for r in range(rows)])
    assert -1e-12 <= ops.marginal_entropy(logits).item() <= math.log(len(values)) + 1e-12


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(-500, 500))
def test_entropy_ignores_a_constant_added_to_all_logits(values, constant):
    logits = torch.tensor(values, dtype=DOUBLE)
    assert ops.entropy(logits + constant).item() == pytest.approx(ops.entropy(logits).item(), abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0, -1e4, 1e4, -1e30, 1e30]), min_size=2, max_size=6))
def test_entropies_are_finite_at_extreme_logits(values):
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([values, values[::-1]], dtype=dtype)
        assert ops.entropy(logits).isfinite().all()
        assert ops.marginal_entropy(logits).isfinite()


@pytest.mark.parametrize("entropy", [ops.entropy, ops.marginal_entropy])
def test_entropies_have_finite_slopes_where_a_probability_underflows(entropy):
    logits = torch.tensor([[200.0, 0.0, 50.0]], requires_grad=True)
    entropy(logits).sum().backward()
    assert logits.grad.isfinite().all()


# --- confident views ---


def test_confident_views_are_those_of_lowest_entropy_first():
    sharpness = torch.tensor([1.0, 9.0, 0.5, 4.0, 2.0], dtype=DOUBLE)
    logits = sharpness[:, None] * randn(1, 6, seed=3)
    assert ops.confident(logits, 0.6).tolist() == [1, 3, 4]


def test_ties_between_views_go_to_the_lower_index():
    row = randn(1, 6)
    logits = torch.cat([row, 5 * row, row, 5 * row, 5 * row, row])
    assert ops.confident(logits, 1.0).tolist() == [1, 3, 4, 0, 2, 5]
    assert ops.confident(torch.zeros(20, 4), 0.25).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("views", "fraction", "count"),
    [
        (64, 0.1, 6),
        (64, 0.3, 19),
        (9, 0.1, 1),
        (19, 0.1, 1),
        (16, 0.3, 4),
        (5, 0.5, 2),
        (1, 0.1, 1),
        (5, 1.0, 5),
        (32, 0.1, 3),
    ],
)
def test_a_fraction_is_rounded_down_and_keeps_at_least_one(views, fraction, count):
    assert ops.kept(views, fraction) == count
    assert len(ops.confident(randn(views, 4), fraction)) == count


# --- building blocks ---


def test_unit_rows_have_length_one_and_zero_stays_zero():
    rows = torch.cat([randn(4, 5), torch.zeros(1, 5, dtype=DOUBLE)])
    assert_close(ops.unit(rows).norm(dim=1), torch.tensor([1.0, 1, 1, 1, 0], dtype=DOUBLE), "arithmetic")


def test_prototypes_are_directions_and_lengths():
    rows = torch.cat([3 * randn(4, 5), torch.zeros(1, 5, dtype=DOUBLE)])
    copy = rows.clone()
    found = ops.prototypes(rows)
    assert found.length.shape == (5, 1)
    assert_close(found.direction, ops.unit(rows), "arithmetic")
    assert_close(found.direction * found.length, rows, "arithmetic")
    assert torch.equal(rows, copy)


def test_affinity_is_alpha_at_cosine_one_and_falls_exponentially():
    cosine = torch.tensor([1.0, 0.8, 0.0, -1.0], dtype=DOUBLE)
    expected = torch.tensor([6 * math.exp(-5 * (1 - c)) for c in (1.0, 0.8, 0.0, -1.0)], dtype=DOUBLE)
    assert_close(ops.affinity(cosine, 6.0, 5.0), expected, "arithmetic")


def test_info_nce_matches_each_query_to_its_own_key():
    queries, keys = ops.unit(randn(5, 7)), ops.unit(randn(5, 7, seed=1))
    expected = 0.0
    for i in range(5):
        weights = [math.exp(float(queries[i] @ keys[j]) / 0.07) for j in range(5)]
        expected -= math.log(weights[i] / sum(weights)) / 5
    assert ops.info_nce(queries, keys, 0.07).item() == pytest.approx(expected, rel=1e-10)


def test_logits_add_the_affinity_of_seen_classes_only():
    rows, text, visual = ops.unit(randn(2, 5)), ops.unit(randn(4, 5, seed=1)), ops.unit(randn(4, 5, seed=2))
    objective = Objective(100.0, 6.0, 5.0, 1.0, 0.5, 0.01, False)
    actual = ops.logits(rows, text, visual, torch.tensor([1.0, 0, 1, 0], dtype=DOUBLE), objective)
    for r in range(2):
        for c in range(4):
            expected = 100 * float(rows[r] @ text[c])
            expected += 6 * math.exp(-5 * (1 - float(rows[r] @ visual[c]))) if c in (0, 2) else 0.0
            assert actual[r, c].item() == pytest.approx(expected, rel=1e-12)


# --- the closed-form gradient ---


def problem(seed: int, rows: int, classes: int, seen: str, *, length: float = 1.0, dtype: torch.dtype = DOUBLE):
    """Rows, unnormalised prototypes, masks: unseen classes are zero, as in a bank."""
    dim = 11
    generator = torch.Generator().manual_seed(1000 + seed)
    centre = torch.randn(dim, generator=generator, dtype=DOUBLE)  # a shared direction, as features of CLIP have
    features = ops.unit(centre + torch.randn(rows, dim, generator=generator, dtype=DOUBLE))
    text = ops.unit(centre + torch.randn(classes, dim, generator=generator, dtype=DOUBLE)) * length
    visual = ops.unit(centre + torch.randn(classes, dim, generator=generator, dtype=DOUBLE)) / length
    masks = {
        "all": torch.ones(classes),
        "none": torch.zeros(classes),
        "one": torch.eye(classes)[0],
        "some": (torch.arange(classes) % 3 != 1).float(),
    }
    mask = masks[seen].to(DOUBLE)
    visual = visual * mask[:, None]
    return [x.to(dtype) for x in (features, text, visual, mask)]


def closed_form(rows, text, visual, seen, aligned, objective):
    return ops.gradient(rows, ops.prototypes(text), ops.prototypes(visual), seen, aligned, objective)


def by_autograd(rows, text, visual, seen, aligned, objective):
    text, visual = text.clone().requires_grad_(), visual.clone().requires_grad_()
    ops.loss(rows, text, visual, seen, aligned, objective).backward()
    return text.grad, torch.zeros_like(visual) if visual.grad is None else visual.grad


@pytest.mark.parametrize("seen", ["all", "none", "one", "some"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "weights", [(1.0, 0.5, 0.01), (1.0, 0.0, 0.01), (0.0, 2.5, 0.01), (1.0, 0.5, 1.0), (0.0, 0.0, 1.0)]
)
def test_gradient_is_that_of_autograd(seen, rows, both, weights):
    for seed, (scale, length) in enumerate([(100.0, 1.0), (10.0, 0.3), (3.0, 7.0)]):
        features, text, visual, mask = problem(seed, rows, 8, seen, length=length)
        objective = Objective(scale, 6.0, 5.0, weights[0], weights[1], weights[2], both)
        actual = closed_form(features, text, visual, mask, mask, objective)
        expected = by_autograd(features, text, visual, mask, mask, objective)
        for name, ours, theirs in zip(("text", "visual"), actual, expected, strict=True):
            assert_close(ours, theirs, "closed form", f"{name}, seed {seed}, scale {scale}")


@pytest.mark.parametrize("both", [False, True])
def test_gradient_with_other_classes_aligned_than_seen(both):
    features, text, visual, seen = problem(7, 3, 9, "all")
    aligned = (torch.arange(9) < 4).to(DOUBLE)
    objective = Objective(20.0, 6.0, 5.0, 1.0, 0.5, 0.1, both)
    actual = closed_form(features, text, visual, seen, aligned, objective)
    expected = by_autograd(features, text, visual, seen, aligned, objective)
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.abs().max() > 1e-3
        assert_close(ours, theirs, "closed form")


def test_gradient_in_single_precision_is_near_autograd_in_double():
    objective = Objective(30.0, 6.0, 5.0, 1.0, 0.5, 0.1, True)
    single = problem(3, 4, 8, "some", dtype=torch.float32)
    double = problem(3, 4, 8, "some")
    actual = closed_form(*single, single[-1], objective)
    expected = by_autograd(*double, double[-1], objective)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs, "closed form")


def test_gradient_does_not_depend_on_unseen_rows():
    features, text, visual, seen = problem(5, 2, 8, "some")
    objective = Objective(30.0, 6.0, 5.0, 1.0, 0.5, 0.01, True)
    filled = torch.where(seen[:, None] > 0, visual, 3 * randn(8, 11, seed=9))
    plain = closed_form(features, text, visual, seen, seen, objective)
    other = closed_form(features, text, filled, seen, seen, objective)
    assert_close(other[0], plain[0], "arithmetic")
    assert_close(other[1], plain[1], "arithmetic")
    assert (other[1][seen == 0] == 0).all()


def test_gradient_does_not_modify_its_arguments():
    given_ = problem(2, 3, 8, "some")
    copies = [x.clone() for x in given_]
    closed_form(*given_, given_[-1], Objective(100.0, 6.0, 5.0, 1.0, 0.5, 0.01, True))
    assert all(torch.equal(x, y) for x, y in zip(given_, copies, strict=True))


@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(["all", "one", "some"]), st.booleans())
def test_gradients_are_orthogonal_to_their_prototypes(seed, rows, seen, both):
    features, text, visual, mask = problem(seed, rows, 6, seen, length=1.7)
    objective = Objective(20.0, 6.0, 5.0, 1.0, 0.5, 0.1, both)
    by_text, by_visual = closed_form(features, text, visual, mask, mask, objective)
    assert by_text.abs().max() > 0
    assert (by_text * text).sum(1).abs().max() <= 1e-11 * (1 + by_text.abs().max())
    assert (by_visual * visual).sum(1).abs().max() <= 1e-11 * (1 + by_visual.abs().max())


@given(st.integers(0, 10_000), st.sampled_from([1e3, 1e5, 1e8]), st.sampled_from(["all", "none", "some"]))
def test_gradient_is_finite_at_extreme_logits(seed, scale, seen):
    for dtype in (torch.float32, torch.float64):
        features, text, visual, mask = problem(seed, 2, 6, seen, dtype=dtype)
        objective = Objective(scale, scale, 5.0, 1.0, 0.5, 1 / scale, True)
        for part in closed_form(features, text, visual, mask, mask, objective):
            assert part.isfinite().all()


# --- AdamW ---


def torch_adamw(gradients: list[torch.Tensor], **settings) -> torch.Tensor:
    """A residual after steps of PyTorch's AdamW with these gradients, from zero."""
    residual = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimiser = torch.optim.AdamW([residual], **settings)
    for gradient in gradients:
        residual.grad = gradient.clone()
        optimiser.step()
    return residual.detach()


@pytest.mark.parametrize("eps", [1e-3, 1e-8])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_first_step_is_that_of_torch_whatever_the_decay(eps, decay):
    grad = randn(5, 7) * torch.logspace(-9, 2, 7, dtype=DOUBLE)
    expected = torch_adamw([grad], lr=6e-4, eps=eps, betas=(0.9, 0.999), weight_decay=decay)
    assert_close(AdamW(6e-4, eps, decay=decay).first(torch.zeros_like(grad), grad), expected, "arithmetic")
    start = randn(5, 7, seed=1)  # the decay acts on the residual, never on what it is added to
    assert_close(AdamW(6e-4, eps, decay=decay).first(start, grad), start + expected, "arithmetic")


def test_first_step_equals_step_number_one():
    grad = randn(5, 7)
    adam = AdamW(6e-4, 1e-3, decay=0.1)
    zero = torch.zeros_like(grad)
    assert_close(adam.first(zero, grad), adam.step(zero, grad, None, 1)[0], "arithmetic")


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_several_steps_are_those_of_torch(decay, betas):
    gradients = [randn(4, 6, seed=s) * 10.0**-s for s in range(5)]
    adam = AdamW(1e-2, 1e-3, betas, decay)
    residual, moments = torch.zeros(4, 6, dtype=DOUBLE), None
    for number, grad in enumerate(gradients, 1):
        residual, moments = adam.step(residual, grad, moments, number)
        expected = torch_adamw(gradients[:number], lr=1e-2, eps=1e-3, betas=betas, weight_decay=decay)
        assert_close(residual, expected, "arithmetic", f"step {number}")


def test_a_rate_of_zero_moves_nothing():
    grad = randn(3, 4)
    for state in ("exact", "fp16"):
        adam = AdamW(0.0, 1e-3, decay=0.1, state=state)
        assert torch.equal(adam.first(grad, grad), grad)
        assert (adam.step(torch.zeros_like(grad), grad, None, 1)[0] == 0).all()


def test_first_step_does_not_modify_its_arguments():
    start, grad = randn(3, 4), randn(3, 4, seed=1)
    copies = start.clone(), grad.clone()
    for state in ("exact", "fp16"):
        AdamW(6e-4, 1e-3, state=state).first(start, grad)
        assert torch.equal(start, copies[0]) and torch.equal(grad, copies[1])


# |g| -> step / lr, exact and in half precision, as printed to three digits
HALF_TABLE = [
    (1e-4, ".091", ".100"),
    (1e-3, ".500", "1.000"),
    (3e-3, ".750", "2.998"),
    (5.4e-3, ".844", "5.401"),
    (5.5e-3, ".846", ".631"),
    (1e-2, ".909", ".839"),
    (0.1, ".990", ".989"),
]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_moments_underflow_as_in_the_table(sign, dtype):
    lr = 6e-4
    grad = torch.tensor([g for g, _, _ in HALF_TABLE], dtype=dtype) * sign
    for column, state in ((1, "exact"), (2, "fp16")):
        moved = AdamW(lr, 1e-3, decay=0.1, state=state).first(torch.zeros_like(grad), grad)
        assert moved.dtype == dtype
        found = [f"{-sign * step / lr:.3f}".removeprefix("0") for step in moved.tolist()]
        assert found == [row[column] for row in HALF_TABLE]


def test_half_precision_steps_are_near_torch_on_half_tensors():
    gradients = [randn(200, seed=s) * 0.02 for s in range(3)]
    adam, residual, moments = AdamW(1e-2, 1e-3, decay=0.1, state="fp16"), torch.zeros(200, dtype=DOUBLE), None
    for number, grad in enumerate(gradients, 1):
        residual, moments = adam.step(residual, grad, moments, number)
    assert moments[1].dtype == torch.float16
    halves = [g.half() for g in gradients]
    expected = torch_adamw(halves, lr=1e-2, eps=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    torch.testing.assert_close(residual, expected.double(), rtol=0.02, atol=1e-4)
