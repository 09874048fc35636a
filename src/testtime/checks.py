"""What every method, encoder and dataset promises, as checks that you can run on your own.

    from testtime.checks import check_dataset, check_encoder, check_method
    check_method(MyMethod())

Each promise is a function that raises `CheckFailed` with its name if it is broken.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from testtime import registry
from testtime.datasets.dataset import Dataset
from testtime.encoding.encoders import load_encoder
from testtime.images.reading import read_image
from testtime.images.views import clean
from testtime.methods.base import ASSUMPTIONS, advance, batch_of, copied, leaves
from testtime.session.session import Session
from testtime.steppers import open_stepper
from testtime.synthetic import toy
from testtime.text.contexts import WORDS, build_context
from testtime.text.prompts import check_classes
from testtime.types import Encoder, FeatureError, InputError, Method, MissingPart, Preprocess, Task

# how far logits may move when the same sum is taken in another order
ORDER_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-8}
# how far features may move when they are computed in another batch, by the precision that the encoder computes in
BATCH_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


SAMPLE = 16  # about as many images of a dataset are read


class CheckFailed(AssertionError):
    """A broken promise."""


def _expect(kept: bool, promise: str) -> None:
    if not kept:
        raise CheckFailed(promise)


def finite_logits(method: Method, task: Task, stream: Tensor) -> None:
    """Logits are finite and of shape (C,) for one view, two views and many."""
    for views in {1, 2, stream.shape[1]}:
        with torch.inference_mode():
            logits = open_stepper(task, [method]).scan(stream[:, :views])[0]
        _expect(logits.shape == (len(stream), task.classes), f"logits of {views} views have shape (N, C)")
        _expect(bool(torch.isfinite(logits).all()), f"logits of {views} views are finite")


def pure_steps(method: Method, task: Task, stream: Tensor) -> None:
    """A step does not modify its state and views, and gives the same answer twice, and in place if it can do that."""
    state = Session(task, method)
    state.scan(stream[: len(stream) // 2])
    before, views = state.state, stream[-1]
    kept, kept_views = [leaf.clone() for leaf in leaves(before)], views.clone()
    first, after = method.step(task, before, views)
    _expect(torch.equal(views, kept_views), "a step does not modify its views")
    _expect(all(map(torch.equal, leaves(before), kept)), "a step does not modify the old state")
    second, again = method.step(task, before, views)
    _expect(torch.equal(first, second), "the same step gives the same logits")
    _expect(all(map(torch.equal, leaves(after), leaves(again))), "the same step gives the same state")
    logits, placed, learned = advance(method, task, copied(before), views)
    _expect(torch.equal(first, logits), "a step in place gives the logits of a step")
    _expect(all(map(torch.equal, leaves(after), leaves(placed))), "a step in place gives the state of a step")
    _expect(bool(learned) == bool(method.learned(before, after)), "a step in place learns where a step does")
    advance(method, task, placed, views)
    _expect(torch.equal(first, logits), "a step in place does not modify the logits of the one before")
    _expect(torch.equal(views, kept_views), "a step in place does not modify the views")


def exact_resume(method: Method, task: Task, stream: Tensor) -> None:
    """A session that is saved midway and loaded resumes bit for bit."""
    whole = Session(task, method).scan(stream)
    half = len(stream) // 2 // batch_of(method) * batch_of(method)
    if not half:
        return  # the stream is a single batch
    with tempfile.TemporaryDirectory() as folder:
        session = Session(task, method)
        first = session.scan(stream[:half])
        loaded = Session.load(session.save(Path(folder) / "half.safetensors"), task)
    _expect(loaded.count == half, "a loaded session knows how many images it has seen")
    _expect(torch.equal(torch.cat([first, loaded.scan(stream[half:])]), whole), "a resumed stream is bit-identical")


def fixed_state(method: Method, task: Task, stream: Tensor) -> None:
    """The state keeps its shapes and types, however long the stream."""
    session = Session(task, method)
    at_first = [(leaf.shape, leaf.dtype) for leaf in leaves(session.state)]
    for _ in _advances(session, stream):
        now = [(leaf.shape, leaf.dtype) for leaf in leaves(session.state)]
        _expect(now == at_first, f"the state keeps its shapes and types; after {session.count} images: {now}")


def _advances(session: Session, stream: Tensor) -> Iterator[Tensor]:
    """The logits of a session that goes along a stream step by step, or batch by batch: (1, C), or (batch, C)."""
    if batch_of(session.method) == 1:
        yield from (session.step(views).logits[None] for views in stream)
    else:
        yield from (session.scan(part) for part in stream.split(batch_of(session.method)))


def plain_settings(method: Method, task: Task, stream: Tensor) -> None:
    """Settings survive JSON, and cannot be changed in place; what the method assumes has a known name."""
    text = json.dumps(registry.settings_of(method))
    again = {key: registry.read_setting(type(method), key, value) for key, value in json.loads(text).items()}
    _expect(type(method)(**again) == method, "a method made from its settings as JSON equals itself")
    parameters = getattr(type(method), "__dataclass_params__", None)
    _expect(parameters is not None and parameters.frozen, "a method is a frozen dataclass")
    unknown = set(getattr(method, "assumes", ())) - set(ASSUMPTIONS)
    _expect(not unknown, f"`assumes` holds only {', '.join(ASSUMPTIONS)}; it holds {', '.join(map(str, unknown))}")
    _expect(hash(method) == hash(type(method)(**again)), f"settings {list(again)} are hashable")


def class_order_irrelevant(method: Method, task: Task, stream: Tensor) -> None:
    """Classes in another order give the same logits in that order."""
    if task.context is not None:
        return  # a text tower has its own class order, which a permuted task cannot change
    order = torch.randperm(task.classes, generator=torch.Generator().manual_seed(0))
    shuffled = replace(task, text=task.text[order], classnames=tuple(task.classnames[i] for i in order.tolist()))
    one, other = Session(task, method).scan(stream), Session(shuffled, method).scan(stream)
    gap = float((one[:, order] - other).abs().max())
    _expect(gap <= ORDER_TOLERANCE[task.text.dtype], f"class order is irrelevant; logits differ by {gap:.1e}")


def bad_features_refused(method: Method, task: Task, stream: Tensor) -> None:
    """NaN, infinite, zero and wrongly shaped features are refused, and nothing changes."""
    session = Session(task, method)
    session.scan(stream[: max(5, batch_of(method))])
    kept, count = [leaf.clone() for leaf in leaves(session.state)], session.count
    broken = {name: stream[5].clone() for name in ("NaN", "infinity", "zeros")}
    broken["NaN"][0, 0], broken["infinity"][-1, 1], broken["zeros"][0] = torch.nan, torch.inf, 0
    broken["a wrong dimension"] = stream[5][:, :-1]
    broken["no views"] = stream[5][:0]
    for name, views in broken.items():
        for attempt in (session.step, session.predict, lambda v: session.scan(v[None])):
            with _refused(f"features with {name}", FeatureError):
                attempt(views)
            same = all(map(torch.equal, leaves(session.state), kept)) and session.count == count
            _expect(same, f"refusing {name} changes nothing")


@contextmanager
def _refused(what: str, error: type[InputError]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise CheckFailed(f"{what} are refused as {error.__name__}")


def scan_is_steps(method: Method, task: Task, stream: Tensor) -> None:
    """`scan` over a chunk gives what single steps give, or single batches."""
    together, one = Session(task, method), Session(task, method)
    logits = together.scan(stream)
    singles = torch.cat(list(_advances(one, stream)))
    gap = float((logits - singles).abs().max())
    _expect(gap <= ORDER_TOLERANCE[task.text.dtype], f"scan equals single steps; logits differ by {gap:.1e}")


METHOD_CHECKS: tuple[Callable[[Method, Task, Tensor], None], ...] = (
    finite_logits,
    pure_steps,
    exact_resume,
    fixed_state,
    plain_settings,
    class_order_irrelevant,
    bad_features_refused,
    scan_is_steps,
)


def check_method(method: Method, task: Task | None = None, stream: Tensor | None = None) -> None:
    """Check every promise of a method; silent if all are kept."""
    if task is None or stream is None:
        task, stream, _ = toy(images=24, views=12)
    for check in METHOD_CHECKS:
        check(method, task, stream)


# Encoders: each check takes an encoder, preprocessed images (B, 3, H, W) and as many texts


def reloads_by_name(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """`load_encoder` makes the same encoder from its name."""
    try:
        again = load_encoder(encoder.name, encoder.device)  # the name says the precision too
    except InputError as problem:
        raise CheckFailed(f"an encoder's name loads it again; {problem}") from problem
    _expect(again.name == encoder.name, f"an encoder's name loads it again; '{encoder.name}' loads '{again.name}'")
    _expect(
        torch.equal(again.encode_images(pixels), encoder.encode_images(pixels)), "loaded again, images are the same"
    )
    _expect(torch.equal(again.encode_texts(texts), encoder.encode_texts(texts)), "loaded again, texts are the same")


def plain_properties(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """Size, logit scale and device are what they should be."""
    _expect(isinstance(encoder.dim, int) and encoder.dim > 0, f"`dim` is a whole number above 0; it is {encoder.dim}")
    scale = encoder.scale
    _expect(isinstance(scale, int | float) and math.isfinite(scale) and scale > 0, f"`scale` is above 0; it is {scale}")
    _expect(isinstance(encoder.device, torch.device), f"`device` is a torch.device; it is {encoder.device!r}")


def unit_rows(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """Features are unit rows (n, D) in float32 on the encoder's device, and gradients may be taken around them."""
    for what, rows in (("images", encoder.encode_images(pixels)), ("texts", encoder.encode_texts(texts))):
        _expect(rows.shape == (len(texts), encoder.dim), f"features of {what} are (n, D); they are {tuple(rows.shape)}")
        _expect(rows.dtype == torch.float32, f"features of {what} are float32; they are {rows.dtype}")
        _expect(rows.device == torch.zeros(0, device=encoder.device).device, f"features of {what} are on its device")
        off = float((rows.norm(dim=1) - 1).abs().max())
        _expect(off < 1e-4, f"features of {what} are unit rows; a length is off by {off:.1e}")
        _expect(not rows.requires_grad and not rows.is_inference(), f"gradients may be taken around those of {what}")


def same_rows_twice(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """The same input gives the same numbers, also from several threads at once."""
    images, sentences = encoder.encode_images(pixels), encoder.encode_texts(texts)
    _expect(torch.equal(encoder.encode_images(pixels), images), "the same images have the same features")
    _expect(torch.equal(encoder.encode_texts(texts), sentences), "the same texts have the same features")
    with ThreadPoolExecutor(4) as pool:
        for rows in pool.map(encoder.encode_images, [pixels] * 4):
            _close(encoder, rows, images, "several threads at once get the same features")


def batch_irrelevant(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """A row does not depend on the others of its batch."""
    alone = torch.cat([encoder.encode_images(image[None]) for image in pixels])
    _close(encoder, encoder.encode_images(pixels), alone, "an image's features do not depend on the batch")
    single = torch.cat([encoder.encode_texts([text]) for text in texts])
    _close(encoder, encoder.encode_texts(texts), single, "a text's features do not depend on the batch")


def empty_batches(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """No images and no texts have no features: (0, D)."""
    for what, rows in (("images", encoder.encode_images(pixels[:0])), ("texts", encoder.encode_texts([]))):
        _expect(rows.shape == (0, encoder.dim), f"no {what} have features (0, D); they are {tuple(rows.shape)}")


def wrong_input_refused(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """An image without a batch axis, greyscale images, and a string in place of a list are refused."""
    for what, wrong in (("images (3, H, W)", pixels[0]), ("images (B, 1, H, W)", pixels[:, :1])):
        with _refused(what, InputError):
            encoder.encode_images(wrong)
    with _refused("texts that are one string", InputError):
        encoder.encode_texts(texts[0])


def inputs_distinguished(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """Different images, and different sentences, have different features."""
    for what, rows in (("images", encoder.encode_images(pixels)), ("sentences", encoder.encode_texts(texts))):
        apart = torch.pdist(rows.double())
        _expect(bool((apart > 1e-6).all()), f"different {what} have different features")


def prompts_start_at_texts(encoder: Encoder, pixels: Tensor, texts: Sequence[str]) -> None:
    """Soft prompts, if the encoder has them, start at the features of their words, and have gradients."""
    if not hasattr(encoder, "soft_prompts"):  # see types.PromptEncoder
        return
    names = ["cat", "grand piano", "fox"]
    try:
        context = build_context(encoder, names)
    except MissingPart:  # one of its models may have no differentiable text tower
        return
    tokens = context.start.float().requires_grad_()
    prototypes = context(tokens)
    _close(
        encoder, prototypes, encoder.encode_texts([f"{WORDS} {name}." for name in names]), "soft prompts start at texts"
    )
    (gradient,) = torch.autograd.grad(prototypes[0, 0], tokens)
    _expect(bool(torch.isfinite(gradient).all() and gradient.any()), "gradients reach the tokens of soft prompts")


def _close(encoder: Encoder, rows: Tensor, expected: Tensor, promise: str) -> None:
    gap = float((rows.detach() - expected).abs().max())
    _expect(gap <= BATCH_TOLERANCE[getattr(encoder, "dtype", torch.float32)], f"{promise}; they differ by {gap:.1e}")


ENCODER_CHECKS: tuple[Callable[[Encoder, Tensor, Sequence[str]], None], ...] = (
    plain_properties,
    unit_rows,
    same_rows_twice,
    batch_irrelevant,
    empty_batches,
    wrong_input_refused,
    inputs_distinguished,
    prompts_start_at_texts,
    reloads_by_name,
)


def check_encoder(encoder: Encoder) -> None:
    """Check every promise of an encoder, on synthetic images run through its own `preprocess`."""
    _expect(isinstance(encoder.preprocess, Preprocess), f"`preprocess` is a Preprocess; it is {encoder.preprocess!r}")
    pixels = torch.stack([clean(_noise_image(size), encoder.preprocess) for size in ((64, 48), (30, 200), (500, 400))])
    texts = ["a photo of a cat.", "a dog", "the very large blue boat, seen from above on a summer's day"]
    for check in ENCODER_CHECKS:
        check(encoder, pixels, texts)


def _noise_image(size: tuple[int, int]) -> Image.Image:
    """Coarse noise of that size, closer to a photograph than white noise; each size gives another image."""
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(sum(size)), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC)


# Datasets: each check takes a dataset


def holds_images(dataset: Dataset) -> None:
    """There are images, and `paths` has as many as it says."""
    _expect(len(dataset) > 0, "a dataset has images")
    _expect(len(list(dataset.paths)) == len(dataset.paths), "`paths` has as many images as it says")


def labels_in_range(dataset: Dataset) -> None:
    """Labels are None, or for each image the index of its class among the names."""
    if dataset.labels is None:
        return
    _expect(len(dataset.labels) == len(dataset), f"{len(dataset)} images have {len(dataset.labels)} labels")
    for index, label in enumerate(dataset.labels):
        known = type(label) is int and 0 <= label < len(dataset.classnames)
        _expect(known, f"labels are whole numbers below {len(dataset.classnames)}; label {index} is {label!r}")


def class_names_valid(dataset: Dataset) -> None:
    """Class names can be encoded: two or more, and none is empty. Unlabelled images need none."""
    if dataset.labels is None and not dataset.classnames:
        return
    try:
        check_classes(dataset.classnames, allow_duplicates=True)
    except InputError as problem:
        raise CheckFailed(f"class names can be used; {problem}") from problem


def images_readable(dataset: Dataset) -> None:
    """Images can be read: a sample spread over the dataset is."""
    for index in range(0, len(dataset), max(1, len(dataset) // SAMPLE)):
        try:
            read_image(dataset.paths[index])
        except InputError as problem:
            raise CheckFailed(f"images can be read; image {index} is not: {problem}") from problem


def order_stable(dataset: Dataset) -> None:
    """Images come in the same order under the same names every time, whether by index or by iteration."""
    names = [str(path) for path in dataset.paths]
    _expect([str(path) for path in dataset.paths] == names, "images come in the same order every time")
    _expect([str(dataset.paths[i]) for i in range(len(dataset))] == names, "`paths[i]` is the image that comes at i")


def names_unique(dataset: Dataset) -> None:
    """`str()` of an image is unique to it."""
    names = [str(path) for path in dataset.paths]
    twice = len(names) - len(set(names))
    _expect(not twice, f"every image has a unique name; {twice} of {len(names)} share one")


DATASET_CHECKS: tuple[Callable[[Dataset], None], ...] = (
    holds_images,
    labels_in_range,
    class_names_valid,
    images_readable,
    order_stable,
    names_unique,
)


def check_dataset(dataset: Dataset) -> None:
    """Check every promise of a dataset; silent if all are kept."""
    for check in DATASET_CHECKS:
        check(dataset)
