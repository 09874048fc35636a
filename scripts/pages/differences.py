"""The differences between DPE's paper and its released code, from the table that defines the presets."""

from __future__ import annotations

from itertools import groupby

from pages import table
from testtime.methods.dpe import DIFFERENCES

# What each difference means in practice; the values are in the table in the code.
EXPLAINED = {
    1: "The paper uses 64 views of every image. The code makes them only for ImageNet and its variants; on the ten "
    "other datasets it sees only the image itself. Neither preset sets this: use `--views`.",
    2: "The paper uses random resized crops. The code crops, flips, and then mixes the crops with AugMix. Neither "
    "preset sets this: use `--augmix`.",
    3: "In the paper cosine and affinity are added and the sum is divided by the temperature, so the affinity is "
    "multiplied by the logit scale of 100 as well. In the code it is not: with alpha = 6 a visual prototype adds "
    "at most 6 to a logit, not 600.",
    4: "The paper chooses the confident views by the prediction from both prototype sets, and takes the entropy of "
    "their averaged probabilities. The code chooses by the text logits alone, and takes the entropy of a single "
    "softmax of the averaged logits.",
    5: "The paper's alignment loss runs both ways, from image to text and back, over all classes and with no "
    "temperature. The code's runs from image to text, over the classes with a non-empty queue, at a "
    "temperature of 0.01, which makes it far sharper.",
    6: "Which queue a feature joins, and with which entropy, is decided by the frozen CLIP in the paper, and by "
    "the evolved text prototypes in the code.",
    7: "The paper keeps the feature of the image. The code keeps the mean of its confident views, which is shorter "
    "than a unit vector and is kept that way.",
    8: "In the paper an image joins its queue after its prediction. In the code it joins first, so it is part "
    "of the visual prototype that it is then compared with.",
    9: "The paper uses the frozen CLIP's entropy to decide whether an image may update the text prototypes, the "
    "code that of the final, adapted prediction. (The paper's sentence also reverses the comparison: read "
    "literally, images *below* the threshold are dropped. Its own ablation, where a threshold of 0 means no "
    "evolution, keeps them, and both presets do; `gate_keeps` offers the literal reading.)",
    10: "The code divides an entropy in nats by the number of bits, so the quotient is at most 0.693 instead of 1, and "
    "its threshold of 0.1 is 0.144 of the maximum entropy.",
    11: "The paper normalises the averaged text prototypes after every update. The code averages them as they are, "
    "and normalises them when they are used.",
    12: "In the paper the counter starts so that the first accepted image replaces the prompt's prototype. In the "
    "code the prompt counts as one image, so the first accepted one has a weight of one half.",
    13: "The paper does not say what an empty queue adds to a logit. In the code it adds nothing, while every class "
    "that has been seen adds something, so early in a stream seen classes are favoured. The paper preset puts the "
    "class's text prototype in its place; this is our interpretation.",
    14: "The paper gives one setting for all datasets: alpha 6, beta 5, lambda 0.5, learning rate 0.0005. The code "
    "has a set for every dataset, chosen by its authors. The released preset is the code's set for ImageNet.",
    15: "The paper's table of prompts and those in the code differ for ImageNet-R, ImageNet-Sketch, Caltech101, "
    "SUN397 and Stanford Cars; `testtime data info NAME` prints both.",
    16: "The paper reports the mean of three runs. The code has one seed, 1.",
}  # fmt: skip


def part() -> str:
    """A table of all options, then each difference in words."""
    head = ["", "option", "released", "paper", "decides"]
    rows = [[str(d.number), f"`{d.option}`", _value(d.released), _value(d.paper), d.meaning] for d in DIFFERENCES]
    lines = [table(head, rows)]
    for number, group in groupby(DIFFERENCES, key=lambda difference: difference.number):
        names = ", ".join(f"`{difference.option}`" for difference in group)
        lines += ["", f"**{number}. {names}.** {EXPLAINED[number]}"]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """A setting as code, a description as plain text."""
    return value if isinstance(value, str) and " " in value else f"`{value!r}`"
