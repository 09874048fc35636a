"""Miniature trees of the fifteen benchmarks, in both layouts, as the tests write them.

Folders and labels are written out here, apart from the tables under test.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image


def png(colour: str = "red") -> bytes:
    """A small image file."""
    buffer = BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


PIXELS = png()

Sample = tuple[str, int, str]  # path from the image folder, label, class name


class Tree(NamedTuple):
    """Where a benchmark's miniature lies, and what is in it, in the order of its stream."""

    coop: str
    tpt: str
    samples: tuple[Sample, ...]
    split: str = ""


TREES = {
    "imagenet": Tree(
        "imagenet/images/val", "ImageNet/val",
        (
            ("n01440764/ILSVRC2012_val_00000001.JPEG", 0, "tench"),
            ("n01440764/ILSVRC2012_val_00000002.JPEG", 0, "tench"),
            ("n01443537/ILSVRC2012_val_00000004.JPEG", 1, "goldfish"),
            ("n15075141/ILSVRC2012_val_00000003.JPEG", 999, "toilet paper"),
        ),
    ),
    "imagenet-v2": Tree(
        "imagenetv2/imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency-format-val",
        (("0/a.jpeg", 0, "tench"), ("2/b.jpeg", 2, "great white shark"), ("10/c.jpeg", 10, "brambling"),
         ("10/d.jpeg", 10, "brambling"), ("100/e.jpeg", 100, "black swan")),
    ),
    "imagenet-a": Tree(
        "imagenet-adversarial/imagenet-a", "imagenet-a",
        (
            ("n01498041/0.000116_digital clock _ digital clock_0.865662.jpg", 0, "stingray"),
            ("n01498041/0.01_jellyfish _ shower curtain_0.5.jpg", 0, "stingray"),
            ("n01531178/0.0003_bushel _ fishing_0.9.jpg", 1, "goldfinch"),
            ("n12267677/0.2_shield_0.8.jpg", 199, "acorn"),
            ("n12267677/README.txt.jpg", 199, "acorn"),
        ),
    ),
    "imagenet-r": Tree(
        "imagenet-rendition/imagenet-r", "imagenet-r",
        (("n01443537/art_0.jpg", 0, "goldfish"), ("n01484850/sketch_1.jpg", 1, "great white shark")),
    ),
    "imagenet-sketch": Tree(
        "imagenet-sketch/images", "ImageNet-Sketch",
        (("n01440764/sketch_0.JPEG", 0, "tench"), ("n15075141/sketch_3.JPEG", 999, "toilet paper")),
    ),
    "caltech101": Tree(
        "caltech-101/101_ObjectCategories", "Caltech101",
        (("Faces/image_0426.jpg", 0, "face"), ("Motorbikes/image_0001.jpg", 1, "motorbike"),
         ("airplanes/image_0003.jpg", 2, "airplane")),
        "split_zhou_Caltech101.json",
    ),
    "dtd": Tree(
        "dtd/images", "DTD/images",
        (("banded/banded_0002.jpg", 0, "banded"), ("polka-dotted/polka-dotted_0001.jpg", 1, "polka-dotted")),
        "split_zhou_DescribableTextures.json",
    ),
    "eurosat": Tree(
        "eurosat/2750", "eurosat",
        (("AnnualCrop/AnnualCrop_1.jpg", 0, "Annual Crop Land"), ("SeaLake/SeaLake_9.jpg", 1, "Sea or Lake")),
        "split_zhou_EuroSAT.json",
    ),
    "fgvc-aircraft": Tree(
        "fgvc_aircraft/images", "fgvc_aircraft/images",
        (("1514522.jpg", 1, "707-320"), ("0747566.jpg", 0, "Cessna 172"), ("0034309.jpg", 2, "A300B4")),
        "images_variant_test.txt",
    ),
    "flowers102": Tree(
        "oxford_flowers/jpg", "Flower102/jpg",
        (("image_06765.jpg", 0, "pink primrose"), ("image_05145.jpg", 1, "hard-leaved pocket orchid")),
        "split_zhou_OxfordFlowers.json",
    ),
    "food101": Tree(
        "food-101/images", "Food101/images",
        (("apple_pie/1011328.jpg", 0, "apple_pie"), ("waffles/971843.jpg", 1, "waffles")),
        "split_zhou_Food101.json",
    ),
    "oxford-pets": Tree(
        "oxford_pets/images", "OxfordPets",
        (("Abyssinian_201.jpg", 0, "abyssinian"), ("yorkshire_terrier_99.jpg", 1, "yorkshire_terrier")),
        "split_zhou_OxfordPets.json",
    ),
    "stanford-cars": Tree(
        "stanford_cars", "StanfordCars",
        (("cars_test/00001.jpg", 1, "2012 Suzuki Aerio Sedan"), ("cars_test/00002.jpg", 0, "2012 Ferrari FF Coupe")),
        "split_zhou_StanfordCars.json",
    ),
    "sun397": Tree(
        "sun397/SUN397", "SUN397",
        (("a/abbey/sun_aakbdcgfpksytcwj.jpg", 0, "abbey"),
         ("a/apartment_building/outdoor/sun_aaa.jpg", 1, "outdoor apartment_building"),
         ("t/theater/indoor_seats/sun_b.jpg", 2, "indoor_seats theater")),
        "split_zhou_SUN397.json",
    ),
    "ucf101": Tree(
        "ucf101/UCF-101-midframes", "UCF101",
        (("Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg", 0, "Apply_Eye_Makeup"),
         ("Yo_Yo/v_YoYo_g07_c04.jpg", 1, "Yo_Yo")),
        "split_zhou_UCF101.json",
    ),
}  # fmt: skip


def write_tree(root: Path, name: str, layout: str) -> Path:
    """Write one benchmark below `root` in the layout 'coop' or 'tpt'; returns the image folder."""
    tree = TREES[name]
    images = root / (tree.coop if layout == "coop" else tree.tpt)
    for path, _, _ in tree.samples:
        write_image(images / path)
    if name == "fgvc-aircraft":
        names = [called for _, called in sorted({(label, called) for _, label, called in tree.samples})]
        (images.parent / "variants.txt").write_text("\n".join(names) + "\n")
        lines = [f"{Path(path).stem} {called}\n" for path, _, called in tree.samples]
        (images.parent / tree.split).write_text("".join(lines))
    elif tree.split:
        home = root / Path(tree.coop).parts[0] if layout == "coop" else root / "data" / "data_splits"
        home.mkdir(parents=True, exist_ok=True)
        rows = [list(sample) for sample in tree.samples]
        (home / tree.split).write_text(json.dumps({"train": [], "val": [], "test": rows}))
    return images


def write_image(path: Path) -> Path:
    """Write one small image file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PIXELS)
    return path
