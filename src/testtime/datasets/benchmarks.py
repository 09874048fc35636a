"""The fifteen benchmarks of the DPE paper as a table: their contents, folders and sources.

Sizes are those of the paper's Table of datasets. Folders are those of the two layouts in use: CoOp's, which the
released code of DPE and TDA reads, and TPT's. Terms are as listed in the paper, or else on the dataset's own page;
"not stated" if neither lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from testtime.datasets.dataset import Dataset
from testtime.registry import Entry, Kind, unknown
from testtime.text.templates import TEMPLATES
from testtime.types import UnknownName

Track = Literal["released", "paper"]


class Benchmark(NamedTuple):
    """One benchmark: its test part, its folders, its source."""

    name: str
    title: str
    kind: Literal["imagenet", "split", "aircraft"]  # how its images are listed
    classes: int
    images: int  # of the test part
    coop: str  # image folder below the folder of all datasets, in CoOp's layout
    tpt: str  # likewise, in TPT's layout
    folders: tuple[str, ...]  # names of the dataset's folder; case, - and _ do not matter
    inside: tuple[str, ...]  # where its images may be, tried in this order
    split: str  # the file that lists the images
    archive: str
    source: str
    terms: str

    @property
    def summary(self) -> str:
        """One line on it."""
        return f"{self.title}: {self.images:,} images, {self.classes:,} classes"


BENCHMARKS = (
    Benchmark(
        "imagenet", "ImageNet", "imagenet", 1000, 50_000,
        coop="imagenet/images/val", tpt="ImageNet/val",
        folders=("imagenet", "ILSVRC2012"), inside=("images/val", "val", "."), split="",
        archive="ILSVRC2012_img_val.tar",
        source="https://image-net.org/challenges/LSVRC/2012/2012-downloads.php",
        terms="Research purposes only",
    ),
    Benchmark(
        "imagenet-v2", "ImageNet-V2 (matched frequency)", "imagenet", 1000, 10_000,
        coop="imagenetv2/imagenetv2-matched-frequency-format-val", tpt="imagenetv2-matched-frequency-format-val",
        folders=("imagenetv2", "imagenetv2-matched-frequency-format-val"),
        inside=("imagenetv2-matched-frequency-format-val", "."), split="",
        archive="imagenetv2-matched-frequency.tar.gz",
        source="https://github.com/modestyachts/ImageNetV2",
        terms="MIT",
    ),
    Benchmark(
        "imagenet-a", "ImageNet-A", "imagenet", 200, 7_500,
        coop="imagenet-adversarial/imagenet-a", tpt="imagenet-a",
        folders=("imagenet-adversarial", "imagenet-a"), inside=("imagenet-a", "."), split="",
        archive="imagenet-a.tar",
        source="https://github.com/hendrycks/natural-adv-examples",
        terms="MIT",
    ),
    Benchmark(
        "imagenet-r", "ImageNet-R", "imagenet", 200, 30_000,
        coop="imagenet-rendition/imagenet-r", tpt="imagenet-r",
        folders=("imagenet-rendition", "imagenet-r"), inside=("imagenet-r", "."), split="",
        archive="imagenet-r.tar",
        source="https://github.com/hendrycks/imagenet-r",
        terms="MIT",
    ),
    Benchmark(
        "imagenet-sketch", "ImageNet-Sketch", "imagenet", 1000, 50_889,
        coop="imagenet-sketch/images", tpt="ImageNet-Sketch",
        folders=("imagenet-sketch",), inside=("images", "sketch", "."), split="",
        archive="ImageNet-Sketch.zip",
        source="https://github.com/HaohanWang/ImageNet-Sketch",
        terms="MIT",
    ),
    Benchmark(
        "caltech101", "Caltech101", "split", 100, 2_465,
        coop="caltech-101/101_ObjectCategories", tpt="Caltech101",
        folders=("caltech-101",), inside=("101_ObjectCategories", "images", "."),
        split="split_zhou_Caltech101.json",
        archive="caltech-101.zip",
        source="https://data.caltech.edu/records/mzrjq-6wc02",
        terms="CC BY 4.0",
    ),
    Benchmark(
        "dtd", "Describable Textures (DTD)", "split", 47, 1_692,
        coop="dtd/images", tpt="DTD/images",
        folders=("dtd",), inside=("images", "."), split="split_zhou_DescribableTextures.json",
        archive="dtd-r1.0.1.tar.gz",
        source="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        terms="Research purposes only",
    ),
    Benchmark(
        "eurosat", "EuroSAT", "split", 10, 8_100,
        coop="eurosat/2750", tpt="eurosat",
        folders=("eurosat",), inside=("2750", "images", "."), split="split_zhou_EuroSAT.json",
        archive="EuroSAT.zip",
        source="https://github.com/phelber/EuroSAT",
        terms="MIT",
    ),
    Benchmark(
        "fgvc-aircraft", "FGVC-Aircraft", "aircraft", 100, 3_333,
        coop="fgvc_aircraft/images", tpt="fgvc_aircraft/images",
        folders=("fgvc_aircraft", "fgvc-aircraft-2013b"), inside=("images", "data/images"),
        split="images_variant_test.txt",
        archive="fgvc-aircraft-2013b.tar.gz",
        source="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        terms="Research purposes only",
    ),
    Benchmark(
        "flowers102", "Flowers102", "split", 102, 2_463,
        coop="oxford_flowers/jpg", tpt="Flower102/jpg",
        folders=("oxford_flowers", "flowers102", "Flower102"), inside=("jpg", "images", "."),
        split="split_zhou_OxfordFlowers.json",
        archive="102flowers.tgz",
        source="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        terms="not stated",
    ),
    Benchmark(
        "food101", "Food101", "split", 101, 30_300,
        coop="food-101/images", tpt="Food101/images",
        folders=("food-101",), inside=("images", "."), split="split_zhou_Food101.json",
        archive="food-101.tar.gz",
        source="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        terms="Scientific fair use; the images belong to their owners",
    ),
    Benchmark(
        "oxford-pets", "Oxford Pets", "split", 37, 3_669,
        coop="oxford_pets/images", tpt="OxfordPets",
        folders=("oxford_pets",), inside=("images", "."), split="split_zhou_OxfordPets.json",
        archive="images.tar.gz",
        source="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        terms="CC BY-SA 4.0",
    ),
    Benchmark(
        "stanford-cars", "Stanford Cars", "split", 196, 8_041,
        coop="stanford_cars", tpt="StanfordCars",
        folders=("stanford_cars",), inside=(".", "images"), split="split_zhou_StanfordCars.json",
        archive="cars_test.tgz",
        source="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        terms="Research purposes only",
    ),
    Benchmark(
        "sun397", "SUN397", "split", 397, 19_850,
        coop="sun397/SUN397", tpt="SUN397",
        folders=("sun397",), inside=("SUN397", "images", "."), split="split_zhou_SUN397.json",
        archive="SUN397.tar.gz",
        source="https://vision.princeton.edu/projects/2010/SUN/",
        terms="Research purposes only",
    ),
    Benchmark(
        "ucf101", "UCF101 (middle frames)", "split", 101, 3_783,
        coop="ucf101/UCF-101-midframes", tpt="UCF101",
        folders=("ucf101",), inside=("UCF-101-midframes", "images", "."), split="split_zhou_UCF101.json",
        archive="UCF-101-midframes.zip",
        source="https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md",
        terms="not stated",
    ),
)  # fmt: skip

SPLITS = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"  # where the split files are linked from


# the prompt sets of DPE's released code and of the paper, where one is not named after the benchmark
PROMPT_SETS: dict[str, tuple[str, str]] = {
    "imagenet": ("imagenet7", "imagenet7"),
    "imagenet-v2": ("imagenet7", "imagenet7"),
    "imagenet-a": ("imagenet7", "imagenet7"),
    "imagenet-r": ("imagenet80", "imagenet7"),
    "imagenet-sketch": ("imagenet80", "imagenet7"),
    "caltech101": ("imagenet7", "single"),
    "stanford-cars": ("stanford-cars", "single"),
    "sun397": ("imagenet7", "single"),
}


def folded(name: str) -> str:
    """A name normalised for comparison: `oxford_pets`, `OxfordPets` and `oxford-pets` are the same."""
    return name.replace("-", "").replace("_", "").replace(" ", "").casefold()


# a plug-in's dataset is a function of its folder and of the part to read, "test" or "train"
Reader = Callable[[Path, str], Dataset]
DATASETS: Kind[Benchmark | Reader] = Kind(
    "dataset", "testtime.datasets", {row.name: Entry(row) for row in BENCHMARKS}, folded
)


def benchmark(name: str) -> Benchmark:
    """The benchmark of that short name; case, `-` and `_` do not matter.

    >>> benchmark("oxford_pets").images
    3669
    """
    found = DATASETS.find(name)
    if not isinstance(found, Benchmark):
        raise UnknownName(f"Dataset '{name}' comes from a plug-in; its size, source and prompts are unknown.")
    return found


def templates(name: str, track: Track = "released") -> tuple[str, ...]:
    """The prompts of a benchmark: as the released code of DPE has them, or as the paper prints them.

    >>> templates("caltech101", "paper")
    ('a photo of a {}.',)
    """
    if track not in get_args(Track):
        raise unknown("track", track, get_args(Track))
    own = benchmark(name).name
    return TEMPLATES[PROMPT_SETS.get(own, (own, own))[track == "paper"]]


def data_text(name: str) -> str:
    """The text of one of the tables that come with the package."""
    return files("testtime.datasets").joinpath("data", name).read_text(encoding="utf-8")
