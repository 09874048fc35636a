"""Diffusion views: variations of an image beside its crops, for DiffTPT.

    variations = FolderVariations("variations/")  # made earlier, one folder per image
    session = Session(task, "difftpt", encoder=encoder, views=64, variations=variations)
    session.step("dog1.jpg")  # the image, 63 crops and 63 variations

The source of variations is a small protocol; your own function will do.
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
SIDE = 224  # input side of its image encoder, in pixels
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def open_variations(spec: str, device: str | torch.device = "cpu") -> FolderVariations | DiffusersVariations:
    """The source of variations: a folder of them, or "diffusers:WEIGHTS" (a folder or a hub repository)."""
    kind, _, weights = spec.partition(":")
    if kind == "diffusers":
        return DiffusersVariations(weights or WEIGHTS, device=device)
    return FolderVariations(spec)


class FolderVariations:
    """Ready-made variations: those of `photos/pets/dog1.jpg` are in `root/pets/dog1/` or `root/dog1/`.

    They are sorted by name, and the first `count` are used. If several folders match, the one that shares most of the
    path is used. An image's path is its `info["path"]`, which `testtime.folder` sets.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.name = str(root)
        if not self.root.is_dir():
            raise InputError(
                f"No folder of variations '{root}'; it should hold one folder per image. To generate them: "
                "--variations diffusers:WEIGHTS."
            )

    def __call__(self, image: Image, count: int, seed: int) -> list[Image]:
        if "path" not in image.info:
            raise InputError("This image has no path, so its variations cannot be found; read it with read_image.")
        return [read_image(path) for path in self.find(image.info["path"], count)]

    def find(self, path: str | Path, count: int) -> list[Path]:
        """The files of the first `count` variations of the image at `path`."""
        folder = self._folder(Path(path))
        found = sorted(p for p in folder.glob("*") if p.suffix.lower() in IMAGE_SUFFIXES) if folder.is_dir() else []
        if len(found) < count:
            raise InputError(f"'{folder}' holds {len(found)} variations of '{path}', {count} are needed.")
        return found[:count]

    def check(self, paths: Sequence[Path], count: int) -> None:
        """Refuse, before encoding starts, images with too few variations and images that would share a folder."""
        taken: dict[Path, Path] = {}
        for path in paths:
            self.find(path, count)
            other = taken.setdefault(self._folder(path), path)
            if other != path:
                raise InputError(
                    f"'{self._folder(path)}' would hold the variations of both '{other}' and '{path}'; "
                    f"put them in '{self.root / path.parent.name / path.stem}', and so on."
                )

    def _folder(self, path: Path) -> Path:
        """The folder of an image's variations, whether or not it exists."""
        parts = path.with_suffix("").parts
        while path.anchor in parts or ".." in parts:
            parts = parts[1:]
        folders = [self.root.joinpath(*parts[start:]) for start in range(len(parts))]
        return next((folder for folder in folders if folder.is_dir()), self.root / path.stem)


class DiffusersVariations:
    """Variations by Stable Diffusion through `diffusers` (extra: testtime[diffusion]); use a GPU.

    `weights` is a folder or a hub repository, `revision` one of its versions. The guidance scale is the paper's.
    The released code sets no seed; here the result depends on `seed`.
    """

    def __init__(
        self,
        weights: str | Path = WEIGHTS,
        revision: str | None = None,
        *,
        guidance: float = 3.0,
        steps: int = 50,  # denoising steps; the library's default
        batch: int = 8,  # images generated at a time
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
        # one generator per image, so that image i does not depend on the batch size
        random = [torch.Generator(self.device).manual_seed(seed * 100_003 + i) for i in range(count)]
        generated: list[Image] = []
        for start in range(0, count, self.batch):
            batch = random[start : start + self.batch]
            generated += self.pipeline(
                pixels,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                num_images_per_prompt=len(batch),
                generator=batch,
                output_type="pil",
            ).images
        return generated


def variation_pixels(image: Image) -> Tensor:
    """An image preprocessed as in the training of the variation model: (1, 3, 224, 224).

    It was trained on images squashed to a square without anti-aliasing; others give worse variations.
    """
    import numpy as np

    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255
    pixels = torch.nn.functional.interpolate(pixels, (SIDE, SIDE), mode="bicubic", antialias=False)
    mean, deviation = (torch.tensor(channels)[:, None, None] for channels in (MEAN, DEVIATION))
    return (pixels - mean) / deviation


def variation_views(preprocess: Preprocess, image: Image, plan: ViewPlan, index: int) -> Tensor:
    """Variations of an image, as many as it has crops: (count - 1, 3, size, size), normalised."""
    if plan.variations is None or plan.count < 2:
        return torch.empty(0, 3, preprocess.size, preprocess.size)
    count = plan.count - 1
    # the released code has no rule for combining seed and index; any that keeps images apart will do
    generated = plan.variations(image, count, plan.seed * 1_000_003 + index)
    if len(generated) != count:
        raise InputError(f"Expected {count} variations; got {len(generated)}.")
    return torch.stack([clean(variation, preprocess) for variation in generated])


def _diffusers() -> Any:
    try:
        return import_module("diffusers")
    except ImportError:
        raise MissingPart(
            "Generating variations needs the package diffusers. Install it with: pip install 'testtime[diffusion]'; "
            "or use FolderVariations with images generated elsewhere."
        ) from None
