"""How close is close: one table, by what is compared and in which precision."""

from __future__ import annotations

import torch

# what is compared -> dtype -> keywords of torch.testing.assert_close
TOLERANCES = {
    # stored traces: expected values were computed in float64 and rounded to float32
    "golden": {
        torch.float64: dict(atol=1e-5, rtol=0.0),
        torch.float32: dict(atol=1e-3, rtol=0.0),
    },
    # the same formula in closed form and by autograd
    "closed form": {
        torch.float64: dict(atol=1e-10, rtol=1e-8),
        torch.float32: dict(atol=1e-4, rtol=1e-3),
    },
    # one arithmetic written twice
    "arithmetic": {
        torch.float64: dict(atol=1e-13, rtol=1e-10),
        torch.float32: dict(atol=1e-6, rtol=1e-5),
    },
    # a method and a fast stepper of it, one step from the same state: logits of size 100
    "stepper": {
        torch.float64: dict(atol=1e-10, rtol=0.0),
        torch.float32: dict(atol=1e-3, rtol=0.0),
    },
    # AdamW's second step: where a gradient is about as small as its eps of 1e-8, its rounding is divided by that
    "second step": {
        torch.float64: dict(atol=1e-5, rtol=1e-6),
        torch.float32: dict(atol=1e-2, rtol=1e-3),
    },
    # a whole stream through an independent loop: rounding is fed back, image after image
    "stream": {
        torch.float64: dict(atol=1e-8, rtol=1e-8),
        torch.float32: dict(atol=2e-3, rtol=1e-3),
    },
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, message: str = "") -> None:
    """Equal within the tolerance for `what` in the precision of `actual`; shapes must agree."""
    expected = torch.as_tensor(expected)
    assert actual.shape == expected.shape, f"{message} shapes {tuple(actual.shape)}, {tuple(expected.shape)}"
    tolerance = TOLERANCES[what][actual.dtype]
    torch.testing.assert_close(
        actual,
        expected.to(actual),
        **tolerance,
        msg=lambda problem: f"{message}\n{problem}" if message else problem,
    )
