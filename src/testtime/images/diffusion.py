"""Diffusion views: variations of an image beside its crops, for DiffTPT.

    variations = FolderVariations("variations/")  # made earlier, one folder an image
    session = Session(task, "difftpt", encoder=encoder, views=64, variations=variations)
    session.step("dog1.jpg")  # the image, 63 crops and 63 variations

Where variations come from is a small protocol; a function of your own will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from testtime.images.reading import IMAGE_SUFFIXES, read_image
from testtime.images.views import clean
from testtime.types import InputError, MissingPart, Preprocess, ViewPlan

if TYPE_CHECKING:
    from PIL.Image import Image

WEIGHTS = "lambdalabs/sd-image-variations-diffusers"  # what the paper generated with
SIDE = 224  # pixels that its image encoder sees
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def open_variations(spec: str, device: str | torch.device = "cpu") -> FolderVariations | DiffusersVariations:
    """Where variations come from: a folder of them, or "diffusers:WEIGHTS" (a folder or a repository on the hub)."""
    kind, _, weights = spec.partition(":")
    if kind == "diffusers":
        return DiffusersVariations(weights or WEIGHTS, device=device)
    return FolderVariations(spec)


class FolderVariations:
    """Ready-made variations: of `photos/pets/dog1.jpg`, the images in `root/pets/dog1/` or `root/dog1/`.

    They are sorted by name, and the first `count` of them are taken. Of several folders that fit, the one that shares
    most of the path is taken. An image says where it is from in `info["path"]`, as those that `testtime.folder` reads
    do.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.name = str(root)
        if not self.root.is_dir():
            raise InputError(
                f"No folder of variations '{root}'; it holds one folder for each image. To draw them: "
                "--variations diffusers:WEIGHTS."
            )

    def __call__(self, image: Image, count: int, seed: int) -> list[Image]:
        if "path" not in image.info:
            raise InputError("This image has no path, so its variations cannot be found; read it with read_image.")
        return [read_image(path) for path in self.find(image.info["path"], count)]

    def find(self, path: str | Path, count: int) -> list[Path]:
        """The files of the first `count` variations of the image at `path`."""
        place = self._place(Path(path))
        found = sorted(p for p in place.glob("*") if p.suffix.lower() in IMAGE_SUFFIXES) if place.is_dir() else []
        if len(found) < count:
            raise InputError(f"'{place}' holds {len(found)} variations of '{path}', {count} are needed.")
        return found[:count]

    def check(self, paths: Sequence[Path], count: int) -> None:
        """Refuse, before anything is encoded, images without enough variations, and two that would share theirs."""
        taken: dict[Path, Path] = {}
        for path in paths:
            self.find(path, count)
            other = taken.setdefault(self._place(path), path)
            if other != path:
                raise InputError(
                    f"'{self._place(path)}' would hold the variations of both '{other}' and '{path}'; "
                    f"put them in '{self.root / path.parent.name / path.stem}', and so on."
                )

    def _place(self, path: Path) -> Path:
        """The folder of an image's variations, whether it is there or not."""
        parts = path.with_suffix("").parts
        while path.anchor in parts or ".." in parts:
            parts = parts[1:]
        places = [self.root.joinpath(*parts[start:]) for start in range(len(parts))]
        return next((place for place in places if place.is_dir()), self.root / path.stem)


class DiffusersVariations:
    """Variations by Stable Diffusion through `diffusers` (extra: testtime[diffusion]); a GPU is all but needed.

    `weights` is a folder or a repository on the hub, `revision` one of its versions. The guidance is the paper's;
    the released code drew without a seed, here `seed` decides.
    """

    def __init__(
        self,
        weights: str | Path = WEIGHTS,
        revision: str | None = None,
        *,
        guidance: float = 3.0,
        steps: int = 50,  # of denoising; the library's default
        batch: int = 8,  # images drawn at once
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if batch < 1 or steps < 1:
            raise InputError(f"batch={batch}, steps={steps}: both must be 1 or more.")
        self.name = f"diffusers:{weights}"
        self.guidance, self.steps, self.batch, self.device = guidance, steps, batch, torch.device(device)
        pipeline = _diffusers().StableDiffusionImageVariationPipeline
        version = {"revision": revision or ("v2.0" if str(weights) == WEIGHTS else "main")}
        try:
            made = pipeline.from_pretrained(str(weights), torch_dtype=dtype, **version)
        except (OSError, ValueError) as problem:
            reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
            raise MissingPart(f"Cannot load the diffusion model '{weights}': {reason}") from None
        self.pipeline = made.to(self.device)
        self.pipeline.set_progress_bar_config(disable=True)

    def __call__(self, image: Image, count: int, seed: int) -> list[Image]:
        pixels = variation_pixels(image).to(self.device)
        # one generator each, so that image i is the same however many are drawn at once
        random = [torch.Generator(self.device).manual_seed(seed * 100_003 + i) for i in range(count)]
        drawn: list[Image] = []
        for start in range(0, count, self.batch):
            some = random[start : start + self.batch]
            drawn += self.pipeline(
                pixels,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                num_images_per_prompt=len(some),
                generator=some,
                output_type="pil",
            ).images
        return drawn


def variation_pixels(image: Image) -> Tensor:
    """An image as the variation model was trained to see it: (1, 3, 224, 224).

    It was trained on images squeezed to a square without anti-aliasing, and draws worse from any others.
    """
    import numpy as np

    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255
    pixels = torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bicubic", antialias=False)
    mean, deviation = (torch.tensor(three)[:, None, None] for three in (MEAN, DEVIATION))
    return (pixels - mean) / deviation


def variation_views(preprocess: Preprocess, image: Image, plan: ViewPlan, index: int) -> Tensor:
    """The variations of an image that go with its crops, as many as these: (count - 1, 3, size, size), normalised."""
    if plan.variations is None or plan.count < 2:
        return torch.empty(0, 3, preprocess.size, preprocess.size)
    count = plan.count - 1
    # the released code makes the two numbers one by no rule; any that keeps images apart will do
    drawn = plan.variations(image, count, plan.seed * 1_000_003 + index)
    if len(drawn) != count:
        raise InputError(f"{count} variations were asked for, and {len(drawn)} came.")
    return torch.stack([clean(one, preprocess) for one in drawn])


def _diffusers() -> Any:
    try:
        return import_module("diffusers")
    except ImportError:
        raise MissingPart(
            "Drawing variations needs the package diffusers. Install it with: pip install 'testtime[diffusion]'; "
            "or use FolderVariations with images drawn elsewhere."
        ) from None
