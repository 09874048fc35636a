"""The bank against the obvious list: append or replace the worst, then sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testtime import bank as banks

CLASSES, DIM = 3, 2


def pushed(offers, slots: int, dtype: torch.dtype = torch.float64) -> banks.Bank:
    """The bank after offers of (label, cost), the n-th carrying the feature (n, -n)."""
    bank = banks.empty(torch.zeros(CLASSES, DIM, dtype=dtype), slots)
    for number, (label, cost) in enumerate(offers, 1):
        feature = torch.tensor([number, -number], dtype=dtype)
        bank = banks.push(bank, torch.tensor(label), feature, torch.tensor(cost, dtype=dtype))
    return bank


def listed(offers, slots: int) -> list[list[tuple[float, int]]]:
    """The same with lists: rows of (cost, number)."""
    rows: list[list[tuple[float, int]]] = [[] for _ in range(CLASSES)]
    for number, (label, cost) in enumerate(offers, 1):
        row = rows[label]
        if len(row) < slots:
            row.append((cost, number))
        elif row and cost < row[-1][0]:
            row[-1] = (cost, number)
        row.sort(key=lambda item: item[0])  # stable: the older of equals stays first
    return rows


def contents(bank: banks.Bank) -> list[list[tuple[float, int]]]:
    """Filled slots of a bank as rows of (cost, number); checks on the way that features belong to them."""
    rows = []
    for costs, keys in zip(bank.cost.tolist(), bank.keys.tolist(), strict=True):
        rows.append([(cost, int(key[0])) for cost, key in zip(costs, keys, strict=True) if math.isfinite(cost)])
        assert all(key[1] == -key[0] for key in keys)
    return rows


# few distinct costs, so that equal ones are common
offered = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), max_size=30)


@given(offered, st.integers(0, 4))
def test_push_is_append_or_replace_the_worst_then_sort(offers, slots):
    bank = pushed(offers, slots)
    assert contents(bank) == listed(offers, slots)


@given(offered, st.integers(0, 4))
def test_a_bank_never_grows_and_empty_slots_come_last(offers, slots):
    bank = pushed(offers, slots)
    assert bank.keys.shape == (CLASSES, slots, DIM)
    assert bank.cost.shape == (CLASSES, slots)
    assert torch.equal(bank.cost, bank.cost.sort(dim=1).values)
    assert (bank.keys[bank.cost.isinf()] == 0).all()


@given(offered, st.integers(1, 4))
def test_prototypes_are_the_means_of_what_is_held(offers, slots):
    bank = pushed(offers, slots)
    for row, prototype, filled in zip(
        listed(offers, slots), banks.prototypes(bank).tolist(), banks.filled(bank).tolist(), strict=True
    ):
        mean = sum(number for _, number in row) / len(row) if row else 0.0
        assert prototype == pytest.approx([mean, -mean])
        assert filled == bool(row)


def test_full_row_drops_the_worst():
    bank = pushed([(1, 0.5), (1, 0.9), (1, 0.7)], slots=2)
    assert contents(bank)[1] == [(0.5, 1), (0.7, 3)]


def test_a_cost_equal_to_the_worst_is_turned_away():
    bank = pushed([(1, 0.5), (1, 0.9), (1, 0.9)], slots=2)
    assert contents(bank)[1] == [(0.5, 1), (0.9, 2)]


def test_the_older_of_equal_costs_comes_first():
    bank = pushed([(0, 0.5), (0, 0.5), (0, 0.2)], slots=3)
    assert contents(bank)[0] == [(0.2, 3), (0.5, 1), (0.5, 2)]


def test_other_classes_are_untouched():
    before = pushed([(0, 0.5), (2, 0.1)], slots=2)
    after = banks.push(before, torch.tensor(1), torch.ones(DIM, dtype=torch.float64), torch.tensor(0.3))
    for label in (0, 2):
        assert torch.equal(before.keys[label], after.keys[label])
        assert torch.equal(before.cost[label], after.cost[label])
    assert banks.filled(after).tolist() == [True, True, True]


@given(offered.filter(bool), st.integers(1, 4))
def test_push_leaves_the_bank_it_was_given_alone(offers, slots):
    before = pushed(offers[:-1], slots)
    keys, cost = before.keys.clone(), before.cost.clone()
    feature = torch.tensor([7.0, -7.0], dtype=torch.float64)
    after = banks.push(before, torch.tensor(offers[-1][0]), feature, torch.tensor(-1.0, dtype=torch.float64))
    assert torch.equal(before.keys, keys)
    assert torch.equal(before.cost, cost)
    assert after.cost[offers[-1][0], 0] == -1  # and it did take the feature


def test_a_bank_without_slots_stays_empty_and_has_zero_prototypes():
    bank = pushed([(0, 0.1), (1, 0.2)], slots=0)
    assert bank.keys.shape == (CLASSES, 0, DIM)
    assert not banks.filled(bank).any()
    assert torch.equal(banks.prototypes(bank), torch.zeros(CLASSES, DIM, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_the_prototypes(dtype):
    bank = pushed([(0, 0.1), (0, 0.3)], slots=2, dtype=dtype)
    assert bank.keys.dtype == bank.cost.dtype == banks.prototypes(bank).dtype == dtype
