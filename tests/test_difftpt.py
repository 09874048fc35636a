"""DiffTPT with a fake diffusion model, and the sources of its views."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tolerances import assert_close

from testtime import InputError, MissingPart, Session, SettingError, StateError, Task, build_task, load_encoder, ops
from testtime.checks import check_method
from testtime.encoding.store import Features
from testtime.encoding.stream import stream
from testtime.images import diffusion
from testtime.images.diffusion import DiffusersVariations, FolderVariations, variation_pixels, variation_views
from testtime.images.reading import read_image
from testtime.images.views import clean
from testtime.methods.difftpt import DiffTPT
from testtime.methods.tpt import TPT, State
from testtime.types import ViewPlan

NAMES = ("cat", "dog", "fox", "grand piano", "oak tree")


@cache
def tiny_task(dtype: torch.dtype = torch.float64) -> Task:
    return build_task(load_encoder("tiny"), NAMES, dtype=dtype, context=True)


def stream_of(images: int, views: int, dtype: torch.dtype = torch.float64):
    task, random = tiny_task(dtype), torch.Generator().manual_seed(0)
    labels = torch.randint(len(NAMES), (images,), generator=random)
    noise = 0.15 * torch.randn(images, views, task.dim, generator=random, dtype=torch.float64)
    return task, ops.unit(task.text[labels][:, None] + noise).to(dtype)


def photo(seed: int = 0, size: tuple[int, int] = (40, 48)) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))


class FakeModel:
    """A fake diffusion model: the image, posterized at random."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, image: Image.Image, count: int, seed: int) -> list[Image.Image]:
        self.seeds.append(seed)
        random = np.random.default_rng(seed)
        return [ImageOps.posterize(image, int(bits)) for bits in random.integers(1, 8, count)]


def encoded(image, source, count: int, seed: int = 0, index: int = 0) -> torch.Tensor:
    """Features of an image, its crops and its variations: (2 count - 1, D)."""
    plan = ViewPlan(count, seed=seed, variations=source)
    (entry,) = stream(load_encoder("tiny"), [image], plan, indices=[index])
    if entry.error is not None:
        raise entry.error
    return entry.features


def chosen_by_hand(logits: torch.Tensor, likeness: float, selection: float) -> list[int]:
    rows = logits.tolist()

    def cosine(row):
        dot = sum(a * b for a, b in zip(row, rows[0], strict=True))
        return dot / math.hypot(*row) / math.hypot(*rows[0])

    def entropy(row):
        p = [math.exp(x - max(row)) for x in row]
        return -sum(x / sum(p) * math.log(x / sum(p)) for x in p)

    others = sorted(range(1, len(rows)), key=lambda i: -cosine(rows[i]))
    alike = [0, *others[: max(1, int(len(others) * likeness))]] if others else [0]
    return sorted(alike, key=lambda i: entropy(rows[i]))[: max(1, int(len(alike) * selection))]


@pytest.mark.parametrize("views", [1, 2, 3, 12, 127])
def test_views_are_filtered_by_likeness_then_by_confidence(views):
    logits = 3 * torch.randn(views, 10, generator=torch.Generator().manual_seed(views), dtype=torch.float64)
    assert DiffTPT().select(logits).tolist() == chosen_by_hand(logits, 0.8, 0.3)


def test_of_127_views_100_and_the_image_are_alike_and_30_tune():
    logits = torch.randn(127, 10, generator=torch.Generator().manual_seed(0))
    alike = DiffTPT().alike(logits)
    assert len(alike) == 101 and alike[0] == 0 and len(set(alike.tolist())) == 101
    assert len(DiffTPT().select(logits)) == 30


def test_it_is_tpt_on_the_chosen_views():
    task, stream = stream_of(3, 127)
    for views in stream:
        rows = DiffTPT().select(task.zero_shot(views))
        # all of them, and the clean view in front for the prediction: TPT alone would tune on it too
        tuned = TPT(steps=4, selection=1.0).tune(task, views[rows][None])
        text = task.context(tuned[0])
        logits, _ = DiffTPT().step(task, State(), views)
        assert_close(logits, task.scale * text @ views[0], "golden")


def test_a_variation_of_something_else_does_not_tune():
    """A view of another class, confident as it may be, is not among the alike."""
    random = torch.Generator().manual_seed(0)
    logits = torch.tensor([9.0, 3, 2, 1]) + torch.randn(20, 4, generator=random)
    logits[7] = torch.tensor([1.0, 2, 3, 30])
    assert TPT(selection=0.3).select(logits)[0] == 7
    assert 7 not in DiffTPT().alike(logits) and 7 not in DiffTPT().select(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_passes_every_check(dtype):
    check_method(DiffTPT(steps=2), *stream_of(8, 12, dtype))


@pytest.mark.parametrize(("name", "value"), [("likeness", 0.0), ("likeness", 1.1), ("selection", 0.0), ("steps", -1)])
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DiffTPT(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_views_are_the_image_its_crops_and_its_variations():
    encoder, model, image = load_encoder("tiny"), FakeModel(), photo()
    views = encoded(image, model, 6, seed=3, index=2)
    assert views.shape == (11, encoder.dim)
    assert_close(views[:6], encoded(image, None, 6, seed=3, index=2), "arithmetic")
    drawn = FakeModel()(image, 5, model.seeds[0])
    assert_close(
        views[6:], encoder.encode_images(torch.stack([clean(d, encoder.preprocess) for d in drawn])), "arithmetic"
    )
    task = build_task(encoder, NAMES, context=True)
    assert DiffTPT().step(task, State(), views)[0].isfinite().all()


def test_variations_depend_on_seed_and_index_alone():
    preprocess, model, image = load_encoder("tiny").preprocess, FakeModel(), photo()

    def views(seed, index):
        return variation_views(preprocess, image, ViewPlan(7, seed=seed, variations=model), index)

    assert torch.equal(views(1, 5), views(1, 5))
    assert len({(views(s, i), model.seeds[-1])[1] for s in (0, 1) for i in (0, 1, 2)}) == 6


def test_an_image_without_crops_has_no_variations():
    preprocess, model = load_encoder("tiny").preprocess, FakeModel()
    assert len(variation_views(preprocess, photo(), ViewPlan(1, variations=model), 0)) == 0 and not model.seeds
    assert len(variation_views(preprocess, photo(), ViewPlan(5), 0)) == 0
    assert len(encoded(photo(), model, 1)) == 1


def test_too_few_variations_are_refused():
    with pytest.raises(InputError, match="Expected 3 variations; got 0"):
        encoded(photo(), lambda image, count, seed: [], 4)


def test_ready_made_variations_are_found_by_the_images_name(tmp_path):
    photo().save(tmp_path / "dog1.jpg")
    (tmp_path / "drawn" / "dog1").mkdir(parents=True)
    for i in (2, 0, 1):
        photo(10 + i).save(tmp_path / "drawn" / "dog1" / f"{i:02d}.png")
    (tmp_path / "drawn" / "dog1" / "notes.txt").write_text("no image")
    image, source = read_image(tmp_path / "dog1.jpg"), FolderVariations(tmp_path / "drawn")
    found = source(image, 2, 0)
    assert [np.array(variation).tolist() for variation in found] == [np.array(photo(10 + i)).tolist() for i in (0, 1)]
    with pytest.raises(InputError, match="holds 3 variations of .*dog1.jpg', 4 are needed"):
        source(image, 4, 0)
    with pytest.raises(InputError, match="has no path"):
        source(photo(), 1, 0)
    photo().save(tmp_path / "cat.jpg")
    with pytest.raises(InputError, match="holds 0 variations"):
        source(read_image(tmp_path / "cat.jpg"), 1, 0)
    with pytest.raises(InputError, match="No folder of variations"):
        FolderVariations(tmp_path / "nowhere")


def test_images_of_one_name_in_two_folders_have_variations_of_their_own(tmp_path):
    for name, seed in {"photos/cat/1": 0, "photos/dog/1": 1, "drawn/cat/1/a": 2, "drawn/dog/1/a": 3}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo(seed).save(tmp_path / f"{name}.png")
    source, photos = FolderVariations(tmp_path / "drawn"), tmp_path / "photos"
    paths = [photos / "cat" / "1.png", photos / "dog" / "1.png"]
    source.check(paths, 1)
    assert [source.find(path, 1)[0].parts[-3] for path in paths] == ["cat", "dog"]
    assert source.find("../photos/dog/1.png", 1) == source.find(paths[1], 1)


def test_two_images_cannot_share_their_variations(tmp_path):
    (tmp_path / "1").mkdir()
    photo().save(tmp_path / "1" / "a.png")
    with pytest.raises(InputError, match="would hold the variations of both 'cat/1.png' and 'dog/1.png'"):
        FolderVariations(tmp_path).check([Path("cat/1.png"), Path("dog/1.png")], 1)


@pytest.fixture
def pets(tmp_path):
    """Four images in `photos`, and three variations of each in `drawn`."""
    for number, name in enumerate(("cat/1", "cat/2", "dog/1", "dog/2")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        photo(number).save(tmp_path / "photos" / f"{name}.png")
        (tmp_path / "drawn" / name).mkdir(parents=True)
        for i in range(3):
            photo(10 * number + i).save(tmp_path / "drawn" / name / f"{i}.png")
    return tmp_path


def test_a_session_encodes_variations_beside_crops(pets):
    encoder, source = load_encoder("tiny"), FolderVariations(pets / "drawn")
    task = build_task(encoder, NAMES, context=True)
    session = Session(task, "difftpt", encoder=encoder, views=4, seed=5, variations=source)
    paths = sorted((pets / "photos").rglob("*.png"))
    found = [prediction.logits for _, prediction in session.run(paths)]
    for index, (path, logits) in enumerate(zip(paths, found, strict=True)):
        views = encoded(read_image(path), source, 4, seed=5, index=index)
        assert views.shape == (7, encoder.dim)
        assert_close(logits, DiffTPT().step(task, State(), ops.unit(views))[0], "stream")


def test_a_saved_session_resumes_with_its_variations_only(pets):
    encoder, source = load_encoder("tiny"), FolderVariations(pets / "drawn")
    task = build_task(encoder, NAMES, context=True)
    session = Session(task, "difftpt", encoder=encoder, views=4, variations=source)
    session.step(pets / "photos" / "cat" / "1.png")
    path = session.save(pets / "state.safetensors")
    again = Session.load(path, task, encoder=encoder, variations=source)
    after = pets / "photos" / "dog" / "1.png"
    assert torch.equal(again.step(after).logits, session.step(after).logits)
    with pytest.raises(StateError, match="made with variations .*drawn, not None"):
        Session.load(path, task, encoder=encoder)
    plain = Session(task, "difftpt", encoder=encoder).save(pets / "plain.safetensors")
    with pytest.raises(StateError, match="made with variations None, not .*drawn"):
        Session.load(plain, task, encoder=encoder, variations=source)


def test_the_command_line_runs_it_on_ready_made_variations(cli, pets):
    common = ["--encoder", "tiny", "--classes", "cat,dog,fox", "--variations", pets / "drawn", "--views", 4]
    done = cli("run", pets / "photos", "--method", "difftpt", *common, "--format", "jsonl")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [Path(row["image"]).name for row in rows] == ["1.png", "2.png"] * 2
    assert cli("run", pets / "photos", "--method", "difftpt", *common, "--format", "jsonl").out == done.out
    store = pets / "views.safetensors"
    done = cli("encode", pets / "photos", *common, "--dtype", "float32", "--out", store)
    assert done.code == 0 and "4 images x 7 views" in done.err, done.err
    features = Features(store)
    assert features.views == 7 and features.metadata["variations"] == str(pets / "drawn")
    shards = ["encode", pets / "photos", *common, "--shard", 2, "--out", pets / "shards"]
    for _ in range(2):  # finished shards are recognised
        assert cli(*shards).code == 0
    assert Features(pets / "shards").views == 7


def test_missing_variations_are_an_error_before_anything_is_encoded(cli, pets):
    common = ["run", pets / "photos", "--encoder", "tiny", "--classes", "cat,dog", "--method", "difftpt"]
    refused = cli(*common, "--variations", pets / "drawn")  # the paper's number, by default
    assert refused.code == 2 and "holds 3 variations of" in refused.err and "63 are needed" in refused.err
    shutil.rmtree(pets / "drawn" / "dog" / "2")
    refused = cli(*common, "--variations", pets / "drawn", "--views", 3)
    assert refused.code == 2 and "holds 0 variations of" in refused.err and refused.out == ""
    refused = cli(*common, "--variations", pets / "drawn", "--views", 1)
    assert refused.code == 2 and "--views 1 with --variations" in refused.err
    refused = cli(*common, "--variations", pets / "nowhere")
    assert refused.code == 2 and "diffusers:WEIGHTS" in refused.err


def test_the_command_line_draws_variations(cli, pets, pipeline):
    common = ["run", pets / "photos", "--encoder", "tiny", "--classes", "cat,dog", "--method", "difftpt"]
    done = cli(*common, "--variations", "diffusers:weights/mine", "--views", 3, "--limit", 2, "--format", "jsonl")
    assert done.code == 0 and len(done.out.splitlines()) == 2, done.err
    assert pipeline.options["weights"] == "weights/mine" and len(pipeline.calls) == 2
    drawn = [call["generator"][0].initial_seed() for call in pipeline.calls]
    cli(*common, "--variations", "diffusers:weights/mine", "--views", 3, "--limit", 2)
    assert [call["generator"][0].initial_seed() for call in pipeline.calls[2:]] == drawn and len(set(drawn)) == 2


def test_the_diffusion_model_gets_the_whole_image_squashed_without_anti_aliasing():
    pixels = variation_pixels(Image.new("L", (300, 100), 128))
    assert pixels.shape == (1, 3, 224, 224)
    grey = (128 / 255 - torch.tensor(diffusion.MEAN)) / torch.tensor(diffusion.DEVIATION)
    assert_close(pixels.mean((0, 2, 3)), grey, "arithmetic")
    # a dot in 100 pixels: without anti-aliasing it is sampled in full or missed, never averaged to grey
    dots = np.zeros((2240, 2240), np.uint8)
    dots[::10, ::10] = 255
    seen = variation_pixels(Image.fromarray(dots))[0, 0]
    assert_close(seen, seen[0, 0].expand(224, 224), "arithmetic")
    assert seen[0, 0] < (0.01 - diffusion.MEAN[0]) / diffusion.DEVIATION[0] - 0.01


class Pipeline:
    """A fake of the library's pipeline: same names; records its calls."""

    calls: list[dict] = []

    @classmethod
    def from_pretrained(cls, weights, **options):
        if weights == "nowhere":
            raise OSError("nowhere is not a local folder\nand more")
        cls.options = {"weights": weights, **options}
        return cls()

    def to(self, device):
        return self

    def set_progress_bar_config(self, **options):
        pass

    def __call__(self, image, **options):
        self.calls.append({"image": image, **options})
        return type("Output", (), {"images": [photo(int(g.initial_seed()) % 1000) for g in options["generator"]]})


@pytest.fixture
def pipeline(monkeypatch):
    library = type("diffusers", (), {"StableDiffusionImageVariationPipeline": Pipeline})
    monkeypatch.setattr(diffusion, "_diffusers", lambda: library)
    monkeypatch.setattr(Pipeline, "calls", [])
    return Pipeline


def test_diffusers_is_called_with_the_papers_guidance_in_batches(pipeline):
    source = DiffusersVariations(batch=4)
    assert pipeline.options == {"weights": diffusion.WEIGHTS, "torch_dtype": torch.float32, "revision": "v2.0"}
    drawn = source(photo(), 10, 5)
    assert len(drawn) == 10
    assert [call["num_images_per_prompt"] for call in pipeline.calls] == [4, 4, 2]
    assert {call["guidance_scale"] for call in pipeline.calls} == {3.0}
    assert all(call["image"].shape == (1, 3, 224, 224) for call in pipeline.calls)
    fewer = DiffusersVariations(batch=3)(photo(), 5, 5)
    assert all(np.array_equal(a, b) for a, b in zip(fewer, drawn, strict=False)), "whatever the batch size"


def test_a_missing_diffusion_model_is_named(pipeline):
    with pytest.raises(MissingPart, match="Cannot load the diffusion model 'nowhere': nowhere is not a local folder$"):
        DiffusersVariations("nowhere")
    with pytest.raises(InputError, match="batch=0"):
        DiffusersVariations(batch=0)


@pytest.mark.skipif(find_spec("diffusers") is not None, reason="diffusers is installed")
def test_without_diffusers_the_way_out_is_named():
    with pytest.raises(MissingPart, match=r"pip install 'testtime\[diffusion\]'; or use FolderVariations"):
        DiffusersVariations()


@pytest.mark.skipif(find_spec("diffusers") is None, reason="needs testtime[diffusion]: no diffusers")
def test_the_library_takes_what_we_pass(pipeline):
    from diffusers import StableDiffusionImageVariationPipeline as real

    DiffusersVariations()(photo(), 1, 0)
    accepted = inspect.signature(real.__call__).parameters
    assert set(pipeline.calls[0]) <= set(accepted)
