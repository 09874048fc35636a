"""The calibrated confidence: as sure as zero-shot, without labels, and part of the state that resumes."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import testtime as tt
from testtime.calibration import MEMORY, TEMPERATURES, Calibration
from testtime.metrics import ExpectedCalibrationError
from testtime.report.gather import Runner
from testtime.session.packaged import demo_stream, largest
from testtime.session.session import Session
from testtime.types import log_of


@pytest.fixture(scope="module", params=[20, 100])
def demo(request: pytest.FixtureRequest) -> tuple[tt.Task, torch.Tensor, torch.Tensor]:
    task, views, labels, _ = largest(demo_stream(), request.param)
    return task, views, labels


def scores(task: tt.Task, views: torch.Tensor, labels: torch.Tensor, method: str) -> tuple[float, float, float]:
    """Calibration error of both confidences in points, and the mean of the calibrated one."""
    runner = Runner(method, Session(task, method))
    runner.advance(views, labels)
    right = torch.tensor(runner.predictions) == labels
    errors = [
        100 * ExpectedCalibrationError().update_answers(torch.tensor(found), right).compute()
        for found in (runner.confidences, runner.calibrated)
    ]
    return *errors, mean(runner.calibrated)


@pytest.mark.parametrize("method", ["tda", "dpe"])
def test_error_on_the_demo_streams_is_at_most_a_point_above_zero_shot(
    demo: tuple[tt.Task, torch.Tensor, torch.Tensor], method: str
) -> None:
    frozen, _, sure = scores(*demo, "zeroshot")
    raw, calibrated, mean = scores(*demo, method)
    assert raw > frozen + 1  # or there would be nothing to mend
    assert calibrated <= frozen + 1
    assert mean == pytest.approx(sure, abs=0.02)


def test_zero_shot_keeps_its_own_confidence() -> None:
    task, stream, _ = tt.toy()
    for views in stream:
        session = Session(task, "zeroshot")
        answer = session.step(views)
        assert answer.calibrated == pytest.approx(answer.confidence, abs=1e-6)


@given(
    st.lists(st.lists(st.floats(-300, 300), min_size=3, max_size=3), min_size=1, max_size=40),
    st.lists(st.floats(1 / 3, 1), min_size=40, max_size=40),
)
def test_any_stream_gives_probabilities_and_the_mean_of_zero_shot(rows: list[list[float]], sure: list[float]) -> None:
    probabilities, frozen = torch.tensor(rows, dtype=torch.float64).softmax(-1), torch.tensor(sure[: len(rows)])
    calibration = Calibration()
    found = calibration.update(log_of(probabilities), frozen)
    assert found.isfinite().all() and (found > 0).all() and (found <= 1).all()
    frozen_sum, *sums = calibration.sums.tolist()
    assert sums == sorted(sums)  # the colder, the surer
    weights = MEMORY ** torch.arange(len(rows) - 1, -1, -1)
    assert frozen_sum == pytest.approx(float((weights * frozen).sum()))
    own = float((weights * probabilities.amax(1)).sum())
    assert sums[TEMPERATURES.index(1.0)] == pytest.approx(own, rel=1e-4)
    # the last image's confidence is that of the interpolated temperature, whose mean is zero-shot's
    if sums[0] < frozen_sum < sums[-1]:
        low = max(i for i, total in enumerate(sums) if total < frozen_sum)
        share = (frozen_sum - sums[low]) / (sums[low + 1] - sums[low])
        last = log_of(probabilities[-1])
        both = [float((last / TEMPERATURES[i]).softmax(-1).max()) for i in (low, low + 1)]
        assert float(found[-1]) == pytest.approx((1 - share) * both[0] + share * both[1], rel=1e-6)


def test_where_a_stream_is_cut_does_not_matter() -> None:
    task, stream, _ = tt.toy()
    whole, parts = (Runner("dpe", Session(task, "dpe")) for _ in range(2))
    whole.advance(stream, None)
    for chunk in stream.split([1, 50, stream.shape[0] - 51]):
        parts.advance(chunk, None)
    assert parts.calibrated == pytest.approx(whole.calibrated, abs=1e-6)
    steps = Session(task, "dpe")
    assert [steps.step(views).calibrated for views in stream] == pytest.approx(whole.calibrated, abs=1e-5)


def test_predict_leaves_it_as_it_was_and_a_fork_has_its_own() -> None:
    task, stream, _ = tt.toy()
    session = Session(task, "dpe")
    for views in stream[:20]:
        session.step(views)
    before = session.calibration.sums.clone()
    looked = session.predict(stream[20]).calibrated
    assert torch.equal(session.calibration.sums, before)
    fork = session.fork()
    assert fork.step(stream[20]).calibrated == pytest.approx(looked, abs=1e-6)
    assert torch.equal(session.calibration.sums, before)
    session.reset()
    assert not session.calibration.sums.any()


def test_saved_and_loaded_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    task, stream, _ = tt.toy()
    session = Session(task, "dpe")
    for views in stream[:30]:
        session.step(views)
    loaded = Session.load(session.save(tmp_path / "state.safetensors"))
    assert torch.equal(loaded.calibration.sums, session.calibration.sums)
    for views in stream[30:40]:
        assert loaded.step(views).calibrated == session.step(views).calibrated


def rewritten(path: Path, sums: torch.Tensor | None) -> Path:
    """A saved state with other sums, or none, as older versions wrote it."""
    with safe_open(path, "pt") as file:
        parts, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    del parts["calibration"]
    save_file(parts if sums is None else parts | {"calibration": sums}, path, metadata)
    return path


def test_older_state_starts_its_calibration_again(tmp_path: Path) -> None:
    task, stream, _ = tt.toy()
    session = Session(task, "dpe")
    session.scan(stream[:30])
    loaded = Session.load(rewritten(session.save(tmp_path / "state.safetensors"), None))
    assert loaded.count == 30 and not loaded.calibration.sums.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_damaged_sums_are_refused(value: float, tmp_path: Path) -> None:
    path = Session(tt.toy()[0], "dpe").save(tmp_path / "state.safetensors")
    with pytest.raises(tt.StateError, match="'calibration'"):
        Session.load(rewritten(path, torch.full((1 + len(TEMPERATURES),), value, dtype=torch.float64)))
    with pytest.raises(tt.StateError, match="'calibration' is"):
        Session.load(rewritten(path, torch.zeros(3, dtype=torch.float64)))
