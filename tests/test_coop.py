from __future__ import annotations

import csv
import json
import math
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import testtime as tt
from testtime.checks import Task
from testtime.encoding.encode import encode_images
from testtime.text import coop
from testtime.text.contexts import build_context
from testtime.text.coop import CoOpSettings, Progress, few_shot, load_prompt, save_prompt, train
from testtime.types import InputError, MissingPart, SettingError, ViewPlan

NAMES = ("cat", "dog", "fox")
QUICK = CoOpSettings(epochs=6, batch=4, lr=0.05)


class Fake:
    """A context without a text tower: the class's own vector plus a linear map of the tokens."""

    def __init__(self, classes: int = 3, tokens: int = 4, width: int = 6, dim: int = 8) -> None:
        noise = torch.Generator().manual_seed(0)
        self.start = torch.randn(tokens, width, generator=noise)
        self.own = torch.randn(classes, dim, generator=noise)
        self.map = torch.randn(classes, tokens * width, dim, generator=noise)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.by_class(tokens.expand(len(self.own), -1, -1))

    def by_class(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.own + torch.einsum("ck,ckd->cd", tokens.flatten(1), self.map), dim=1)


def fake_task(**sizes: int) -> Task:
    context = Fake(**sizes)
    return Task(context(context.start), NAMES, scale=10.0, encoder="fake", context=context)


def images(dim: int = 8, views: int = 2, each: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit features (N, V, D) around a direction of each class, and labels."""
    noise = torch.Generator().manual_seed(1)
    labels = torch.arange(3).repeat_interleave(each)
    centre = torch.randn(3, 1, dim, generator=noise)
    return F.normalize(centre[labels] + 0.3 * torch.randn(len(labels), views, dim, generator=noise), dim=-1), labels


@pytest.fixture(scope="module")
def tiny():
    return tt.load_encoder("tiny")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six small images of each class, one colour per class, in folders named after it."""
    noise = np.random.default_rng(0)
    for channel, name in enumerate(NAMES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = noise.integers(0, 90, (40, 40, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


# training


@pytest.mark.parametrize("class_specific", [False, True])
def test_the_loss_falls_and_the_training_images_are_learned(class_specific) -> None:
    features, labels = images()
    log: list[Progress] = []
    settings = replace(QUICK, epochs=20, class_specific=class_specific)
    tokens = train(fake_task(), features, labels, settings, progress=log.append)
    assert tokens.shape == ((3, 4, 6) if class_specific else (4, 6))
    assert [entry.epoch for entry in log] == list(range(1, 21))
    assert log[-1].loss < log[0].loss / 2 and log[-1].accuracy > log[0].accuracy


def test_one_epoch_is_torch_s_own_sgd_on_the_same_batches() -> None:
    features, labels = images(views=1)
    task = fake_task()
    settings = replace(QUICK, epochs=3, batch=24, warmup_epochs=1)  # one batch per epoch, so that order does not matter
    learned = train(task, features, labels, settings)
    tokens = coop._start(task.context, 3, settings).tokens.requires_grad_()
    optimiser = torch.optim.SGD([tokens], lr=1.0, momentum=0.9, weight_decay=5e-4)
    for rate in (1e-5, 0.05, 0.05 * (1 + math.cos(math.pi / 3)) / 2):
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        F.cross_entropy(10.0 * features[:, 0] @ task.context(tokens).T, labels).backward()
        optimiser.step()
    torch.testing.assert_close(learned, tokens.detach(), atol=1e-6, rtol=1e-5)


def test_rates_are_dassl_s_constant_warm_up_before_a_cosine() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=0.002)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 50)
    expected = [1e-5]
    for _ in range(49):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        cosine.step()
    assert [CoOpSettings().rate(epoch) for epoch in range(50)] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("class_specific", [False, True])
@pytest.mark.parametrize("stop", [1, 4])
def test_interrupted_and_resumed_training_gives_the_same_bits(tmp_path, class_specific, stop) -> None:
    features, labels = images()
    task, settings = fake_task(), replace(QUICK, class_specific=class_specific)
    whole = train(task, features, labels, settings, checkpoint=tmp_path / "whole.safetensors")

    def interrupt(progress: Progress) -> None:
        if progress.epoch == stop:
            raise KeyboardInterrupt

    path = tmp_path / "cut.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(task, features, labels, settings, checkpoint=path, progress=interrupt)
    assert load_prompt(path).epoch == stop
    log: list[Progress] = []
    resumed = train(task, features, labels, settings, checkpoint=path, resume=True, progress=log.append)
    assert torch.equal(resumed, whole) and len(log) == settings.epochs - stop
    first, second = load_file(path), load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in ("ctx", "momentum", "centre"))
    assert torch.equal(train(task, features, labels, settings, checkpoint=path, resume=True), whole)  # nothing to do


def test_an_interrupt_inside_an_epoch_leaves_the_last_checkpoint(tmp_path) -> None:
    features, labels = images()
    task = fake_task()
    whole = train(task, features, labels, QUICK)
    calls = 0

    class Breaking(Fake):
        def by_class(self, tokens):
            nonlocal calls
            calls += 1
            if calls == 15:  # in the third epoch, of six batches
                raise KeyboardInterrupt
            return super().by_class(tokens)

    path = tmp_path / "p.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(replace(task, context=Breaking()), features, labels, QUICK, checkpoint=path)
    assert load_prompt(path).epoch == 2 and list(tmp_path.iterdir()) == [path]
    assert torch.equal(train(task, features, labels, QUICK, checkpoint=path, resume=True), whole)


def test_a_checkpoint_of_another_training_is_refused(tmp_path) -> None:
    features, labels = images()
    task, path = fake_task(), tmp_path / "p.safetensors"
    train(task, features, labels, QUICK, checkpoint=path)

    def resume(task=task, features=features, labels=labels, settings=QUICK) -> None:
        train(task, features, labels, settings, checkpoint=path, resume=True)

    resume()
    with pytest.raises(InputError, match="lr=0.05, not 0.1"):
        resume(settings=replace(QUICK, lr=0.1))
    with pytest.raises(InputError, match="other classnames"):
        resume(task=replace(task, classnames=("a", "b", "c")))
    with pytest.raises(InputError, match="other encoder"):
        resume(task=replace(task, encoder="another"))
    with pytest.raises(InputError, match="other labels"):
        resume(labels=labels.flip(0))
    with pytest.raises(InputError, match="other images"):
        resume(features=features.flip(-1))
    save_prompt(path, torch.zeros(4, 6), classnames=NAMES, encoder="fake")
    with pytest.raises(InputError, match="not a training checkpoint"):
        resume()


def test_views_are_drawn_again_every_epoch_by_the_seed() -> None:
    features, labels = images(views=4)
    task = fake_task()
    several = train(task, features, labels, QUICK)
    assert torch.equal(several, train(task, features, labels, QUICK))
    assert not torch.equal(several, train(task, features[:, :1], labels, QUICK))
    assert not torch.equal(several, train(task, features, labels, replace(QUICK, seed=2)))
    assert torch.equal(train(task, features[:, 0], labels, QUICK), train(task, features[:, :1], labels, QUICK))


def test_training_starts_from_random_tokens_or_from_the_words() -> None:
    context = Fake(width=4000)
    start = coop._start(context, 3, CoOpSettings()).tokens
    assert abs(float(start.std()) - 0.02) < 1e-3 and abs(float(start.mean())) < 1e-3
    words = coop._start(context, 3, CoOpSettings(init="a photo of a", class_specific=True)).tokens
    assert torch.equal(words[2], context.start)
    with pytest.raises(InputError, match="makes 4 tokens, n_ctx is 5"):
        coop._start(context, 3, CoOpSettings(init="a photo of a", n_ctx=5))


def test_untrainable_input_is_refused() -> None:
    features, labels = images()
    task = fake_task()
    with pytest.raises(MissingPart, match="no differentiable text tower"):
        train(replace(task, context=None), features, labels, QUICK)
    with pytest.raises(InputError, match="24 whole numbers"):
        train(task, features, labels[:5], QUICK)
    with pytest.raises(InputError, match="from 0 to 2"):
        train(task, features, labels + 1, QUICK)
    with pytest.raises(InputError, match="Views must be"):
        train(task, features[..., :5], labels, QUICK)
    with pytest.raises(SettingError, match="epochs=0"):
        CoOpSettings(epochs=0)
    with pytest.raises(SettingError, match="lr"):
        CoOpSettings(lr=float("nan"))


def test_training_leaves_the_global_random_state_alone() -> None:
    features, labels = images()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(fake_task(), features, labels, QUICK)
    assert torch.equal(torch.rand(3), expected)


def test_the_real_text_tower_learns(tiny) -> None:
    task = tt.build_task(tiny, NAMES, context=coop.blank_words(4))
    features, labels = images(dim=32, views=1)
    log: list[Progress] = []
    train(task, features, labels, replace(QUICK, epochs=8, lr=0.02, batch=8), progress=log.append)
    assert log[-1].loss < log[0].loss


# few shots


def test_few_shots_are_balanced_and_depend_on_the_seed_alone() -> None:
    labels = torch.tensor([0, 1, 2] * 30 + [1] * 10 + [2])
    chosen = few_shot(labels, 16, seed=1)
    assert torch.bincount(labels[chosen]).tolist() == [16, 16, 16]
    assert torch.equal(chosen, few_shot(labels.tolist(), 16, seed=1))
    assert torch.equal(chosen, chosen.unique())
    assert not torch.equal(chosen, few_shot(labels, 16, seed=2))
    without = few_shot(labels[labels != 0], 16, seed=1)  # the draw of a class does not depend on the others
    indices = (labels != 0).nonzero().squeeze(1)[without]
    assert torch.equal(indices, chosen[labels[chosen] != 0])


def test_a_class_with_fewer_images_gives_all_of_them() -> None:
    assert few_shot([0, 1, 1, 1], 2, seed=0).tolist()[:1] == [0]
    assert len(few_shot([0, 1, 1, 1], 2, seed=0)) == 3


# files


def published(path: Path, tokens: torch.Tensor, prefix: str = "", classes: int = 3) -> Path:
    """A file in Dassl's format: weights, an optimiser, its schedule and a score."""
    width = tokens.shape[-1]
    state = OrderedDict(
        [
            (f"{prefix}ctx", tokens.half()),
            (f"{prefix}token_prefix", torch.zeros(classes, 1, width).half()),
            (f"{prefix}token_suffix", torch.zeros(classes, 72, width).half()),
        ]
    )
    parameter = torch.nn.Parameter(tokens.clone())
    optimiser = torch.optim.SGD([parameter], lr=0.002, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 50.0)
    parameter.sum().backward()
    optimiser.step()
    schedule.step()
    scheduler = {"successor": schedule, "warmup_epoch": 1, "cons_lr": 1e-5, "last_epoch": 1}
    torch.save(
        {
            "state_dict": state,
            "epoch": 50,
            "optimizer": optimiser.state_dict(),
            "scheduler": scheduler,
            "val_result": np.float64(71.9),
        },
        path,
    )
    return path


@pytest.mark.parametrize("prefix", ["", "prompt_learner.", "module.prompt_learner."])
@pytest.mark.parametrize("shape", [(4, 64), (3, 4, 64)])
def test_the_published_layout_loads(tmp_path, prefix, shape) -> None:
    tokens = torch.randn(shape)
    prompt = load_prompt(published(tmp_path / "model.pth.tar-50", tokens, prefix))
    assert torch.equal(prompt.tokens, tokens.half().float())
    assert prompt.classnames is None and prompt.class_specific == (len(shape) == 3)


def test_a_file_with_code_in_it_is_refused_and_the_code_not_run(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "broken in"),)

    torch.save({"state_dict": {"ctx": torch.zeros(4, 64)}, "scheduler": Evil()}, tmp_path / "p.pth")
    with pytest.raises(InputError, match="never run"):
        load_prompt(tmp_path / "p.pth")
    assert not (tmp_path / "broken in").exists()


def test_a_saved_prompt_comes_back(tmp_path) -> None:
    tokens = torch.randn(4, 64)
    path = save_prompt(tmp_path / "p.safetensors", tokens, classnames=NAMES, encoder="tiny", settings=QUICK)
    prompt = load_prompt(path)
    assert torch.equal(prompt.tokens, tokens) and prompt.classnames == NAMES and prompt.encoder == "tiny"
    assert prompt.settings is not None and CoOpSettings(**prompt.settings) == QUICK and prompt.epoch == QUICK.epochs


def _text(path: Path) -> None:
    path.write_text("no prompt")


def _other(path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(3)}}, path)


def _list(path: Path) -> None:
    torch.save([torch.zeros(3)], path)


def _features(path: Path) -> None:
    save_file({"views": torch.zeros(3, 1, 4)}, path)


def _session(path: Path) -> None:
    save_file({"ctx": torch.zeros(3, 4)}, path, {"format": "testtime.session"})


def _newer(path: Path) -> None:
    save_file({"ctx": torch.zeros(3, 4)}, path, {"format": "testtime.prompt", "version": "9"})


def _without_metadata(path: Path) -> None:
    save_file({"ctx": torch.zeros(3, 4)}, path, {"format": "testtime.prompt", "version": "1"})


def _flat(path: Path) -> None:
    torch.save({"state_dict": {"ctx": torch.zeros(4)}}, path)


def _nan(path: Path) -> None:
    torch.save({"state_dict": {"ctx": torch.full((4, 4), math.nan)}}, path)


@pytest.mark.parametrize(
    ("write", "name", "expected"),
    [
        (_text, "p.pth", "is not a prompt"),
        (_text, "p.safetensors", "not a safetensors file"),
        (_other, "p.pth", r"no learned tokens 'ctx' \(weight\)"),
        (_list, "p.pth", "holds a list"),
        (_features, "p.safetensors", "no learned tokens 'ctx'"),
        (_session, "p.safetensors", "holds 'testtime.session'"),
        (_newer, "p.safetensors", "version 9"),
        (_without_metadata, "p.safetensors", "is damaged"),
        (_flat, "p.pth", r"got \(4,\)"),
        (_nan, "p.pth", "NaN or infinity"),
        (Path.mkdir, "folder", "is a folder"),
        (lambda path: None, "missing.safetensors", "No prompt file"),
    ],
)
def test_files_that_are_not_prompts_are_refused(tmp_path, write, name, expected) -> None:
    write(tmp_path / name)
    with pytest.raises(InputError, match=expected):
        load_prompt(tmp_path / name)


# tasks


def test_a_task_takes_its_prototypes_and_its_start_from_a_prompt(tiny, tmp_path) -> None:
    tokens = 0.02 * torch.randn(7, 64)
    path = save_prompt(tmp_path / "p.safetensors", tokens, classnames=NAMES, encoder="tiny")
    task = tt.build_task(tiny, ["wolf", "owl"], prompts=f"coop:{path}")  # general prompts work for other classes too
    context = build_context(tiny, ["wolf", "owl"], words=coop.blank_words(7))
    assert torch.equal(task.text, context(tokens)) and task.scale == tiny.scale
    assert task.context is not None and torch.equal(task.context.start, tokens)
    torch.testing.assert_close(task.text.norm(dim=1), torch.ones(2))
    moved = tokens.clone().requires_grad_()
    task.context(moved).sum().backward()
    assert moved.grad is not None and moved.grad.abs().sum() > 0


def test_the_embedded_words_themselves_give_the_template_s_prototypes(tiny, tmp_path) -> None:
    words = build_context(tiny, NAMES).start
    path = published(tmp_path / "p.pth", words)
    text = tt.build_task(tiny, NAMES, prompts=f"coop:{path}").text
    torch.testing.assert_close(text, tt.build_task(tiny, NAMES).text, atol=1e-3, rtol=0)  # the file is half precision


def test_class_specific_tokens_follow_their_class_s_name(tiny, tmp_path) -> None:
    tokens = 0.02 * torch.randn(3, 4, 64)
    path = save_prompt(tmp_path / "p.safetensors", tokens, classnames=NAMES, encoder="tiny")
    task = tt.build_task(tiny, NAMES, prompts=f"coop:{path}")
    turned = tt.build_task(tiny, ["fox", "cat"], prompts=f"coop:{path}")
    torch.testing.assert_close(turned.text, task.text[[2, 0]])
    assert task.context is None
    with pytest.raises(InputError, match="'owl' is not among them"):
        tt.build_task(tiny, ["fox", "owl"], prompts=f"coop:{path}")
    theirs = published(tmp_path / "p.pth", tokens)
    torch.testing.assert_close(tt.build_task(tiny, NAMES, prompts=f"coop:{theirs}").text, task.text, atol=1e-3, rtol=0)
    with pytest.raises(InputError, match="each of 3 classes, this task has 2"):
        tt.build_task(tiny, ["fox", "cat"], prompts=f"coop:{theirs}")


def test_prompts_that_do_not_fit_are_refused(tiny, tmp_path) -> None:
    path = published(tmp_path / "p.pth", torch.zeros(4, 512))
    with pytest.raises(InputError, match="width 512, the text tower of 'tiny' of 64"):
        tt.build_task(tiny, NAMES, prompts=f"coop:{path}")
    other = save_prompt(tmp_path / "p.safetensors", torch.zeros(4, 64), classnames=NAMES, encoder="tiny:3")
    with pytest.raises(InputError, match="learned with encoder 'tiny:3', not 'tiny'"):
        tt.build_task(tiny, NAMES, prompts=f"coop:{other}")
    with pytest.raises(InputError, match="write coop:FILE"):
        tt.build_task(tiny, NAMES, prompts="cupl:x")
    with pytest.raises(InputError, match="leave out templates"):
        tt.build_task(tiny, NAMES, templates="single", prompts=f"coop:{other}")


# the command line


def test_prompts_are_trained_and_used_through_the_command_line(cli, photos, tmp_path) -> None:
    out = tmp_path / "p.safetensors"
    common = ("--classes", "cat,dog,fox", "--encoder", "tiny")
    learn = ("train-prompts", photos, *common, "--shots", 4, "--epochs", 5, "--set", "lr=0.02", "--set", "batch=6")
    code, _, err = cli(*learn, "--out", out)
    assert code == 0 and "epoch 5 of 5: loss" in err and "12 images of 3 classes" in err
    prompt = load_prompt(out)
    assert prompt.epoch == 5 and prompt.tokens.shape == (4, 64) and prompt.classnames == NAMES

    code, _, err = cli(*learn, "--out", out)
    assert code == 2 and "--resume" in err
    code, _, err = cli(*learn, "--out", out, "--resume")
    assert code == 0 and "no epochs left" in err
    code, _, err = cli(*learn, "--out", out, "--resume", "--set", "lr=0.1")
    assert code == 2 and "lr=0.02, not 0.1" in err

    for method in ("zeroshot", "dpe", "tpt"):  # tpt starts from the learned tokens
        rows = tmp_path / f"{method}.csv"
        code, _, err = cli("run", photos, *common, "--method", method, "--prompts", f"coop:{out}", "--out", rows)
        assert code == 0 and "accuracy on 18 images" in err
        with open(rows, newline="") as file:
            assert len(list(csv.DictReader(file))) == 18
    code, _, err = cli("encode", photos, *common, "--prompts", f"coop:{out}", "--out", tmp_path / "f.safetensors")
    assert code == 0
    text = tt.build_task(tt.load_encoder("tiny"), NAMES, prompts=f"coop:{out}").text
    assert torch.equal(tt.Features(tmp_path / "f.safetensors").text, text)


def test_a_split_names_the_training_images(cli, photos, tmp_path) -> None:
    rows = [[f"{name}/{i}.png", label, name] for label, name in enumerate(NAMES) for i in range(6)]
    (tmp_path / "split.json").write_text(json.dumps({"train": rows, "val": [], "test": []}))
    learn = ("train-prompts", "--split", tmp_path / "split.json", "--encoder", "tiny", "--shots", 2, "--epochs", 2)
    code, _, err = cli(*learn, "--root", photos, "--out", tmp_path / "p.safetensors", "--set", "class_specific=yes")
    assert code == 0 and "6 images of 3 classes" in err
    assert load_prompt(tmp_path / "p.safetensors").tokens.shape == (3, 4, 64)
    (tmp_path / "empty").mkdir()
    code, _, said = cli(*learn, "--root", tmp_path / "empty", "--out", tmp_path / "q.safetensors")
    assert code == 2 and "give the folder that the paths are relative to" in said
    (tmp_path / "split.json").write_text("[]")
    code, _, err = cli(*learn, "--root", photos, "--out", tmp_path / "q.safetensors")
    assert code == 2 and "is not a split file" in err


def test_words_set_the_number_of_tokens(cli, photos, tmp_path) -> None:
    out = tmp_path / "p.safetensors"
    code, _, _ = cli(
        *("train-prompts", photos, "--classes", "cat,dog,fox", "--encoder", "tiny", "--shots", 1, "--epochs", 1),
        *("--set", "init=a nice clean photo of a", "--views", 2, "--out", out),
    )  # fmt: skip
    assert code == 0 and load_prompt(out).tokens.shape == (6, 64)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--classes", "cat,owl"], "No training images of 'owl'"),
        (["--classes", "cat,dog", "--set", "shotss=2"], "Did you mean 'shots'"),
        (["--classes", "cat,dog", "--epochs", "0"], "epochs=0"),
        (["--classes", "cat,dog", "--root", "x"], "--root needs --split"),
        (["--classes", "cat,dog", "--split", "x.json"], "one of the two"),
    ],
)
def test_mistakes_in_training_are_reported_in_one_line(cli, photos, tmp_path, arguments, expected) -> None:
    code, _, err = cli("train-prompts", photos, "--encoder", "tiny", "--out", tmp_path / "p.safetensors", *arguments)
    assert code == 2 and expected in err and not (tmp_path / "p.safetensors").exists()


def test_an_unreadable_image_is_skipped_and_reported(cli, photos, tmp_path) -> None:
    (photos / "cat" / "0.png").write_bytes(b"no image")
    learn = ("train-prompts", photos, "--classes", "cat,dog,fox", "--encoder", "tiny", "--epochs", 1)
    code, _, err = cli(*learn, "--out", tmp_path / "p.safetensors")
    assert code == 0 and "skipped" in err and "17 images" in err
    code, _, err = cli(*learn, "--out", tmp_path / "q.safetensors", "--strict")
    assert code == 2 and "0.png" in err


def test_an_interrupted_command_resumes_to_the_same_prompt(cli, photos, tmp_path, monkeypatch) -> None:
    learn = ("train-prompts", photos, "--classes", "cat,dog,fox", "--encoder", "tiny", "--epochs", 4, "--shots", 3)
    assert cli(*learn, "--out", tmp_path / "whole.safetensors")[0] == 0
    write, cut = coop._write, tmp_path / "cut.safetensors"

    def write_and_break(path: Path, state: coop._State, *rest: object) -> Path:
        if state.epoch == 3:
            raise KeyboardInterrupt
        return write(path, state, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(coop, "_write", write_and_break)
        assert cli(*learn, "--out", cut)[0] == 130
    assert load_prompt(cut).epoch == 2
    assert cli(*learn, "--out", cut, "--resume")[0] == 0
    assert torch.equal(load_prompt(cut).tokens, load_prompt(tmp_path / "whole.safetensors").tokens)


def test_features_are_those_of_the_readable_images_by_index(tiny, photos) -> None:
    paths = sorted(photos.glob("*/*.png"))[:5]
    whole, _ = encode_images(tiny, paths, ViewPlan(3, seed=1))
    assert whole.shape == (5, 3, 32)
    paths[2].write_bytes(b"no image")
    skipped, done = [], []
    features, kept = encode_images(tiny, paths, ViewPlan(3, seed=1), on_skip=skipped.append, progress=done.append)
    assert kept == [0, 1, 3, 4] and torch.equal(features, whole[kept])
    assert done == [1, 2, 3, 4, 5] and len(skipped) == 1 and "2.png" in skipped[0]
    with pytest.raises(InputError, match=r"2\.png"):
        encode_images(tiny, paths)
    with pytest.raises(InputError, match="None of the 1 images"):
        encode_images(tiny, paths[2:3], on_skip=skipped.append)
