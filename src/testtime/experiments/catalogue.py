"""The paper's results as data: what each experiment runs, and the published table to compare it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})
NATURAL = ("imagenet", "imagenet-a", "imagenet-v2", "imagenet-r", "imagenet-sketch")
CROSS = (
    "fgvc-aircraft",
    "caltech101",
    "stanford-cars",
    "dtd",
    "eurosat",
    "flowers102",
    "food101",
    "oxford-pets",
    "sun397",
    "ucf101",
)
CLIPS = ("open_clip:RN50/openai", "open_clip:ViT-B-16/openai")
LARGE = ("open_clip:ViT-L-14/laion2b_s32b_b82k",)

# what a row's text prototypes are made of
TEXTS = {
    "single": "a photo of a {}.",
    "ensemble": "the seven templates of ImageNet",
    "ensemble80": "the eighty templates of ImageNet",
    "templates": "the dataset's templates",
    "descriptions": "descriptions only",
    "both": "the dataset's templates with descriptions, which are required",
    "full": "the dataset's templates, with descriptions where they are given",
    "learned": "a prompt learned by CoOp",
    "given": "a prompt learned by CoOp where one is given, else as full",
}


class Row(NamedTuple):
    """One row of an experiment: a method with some settings and some text."""

    label: str
    method: str = "dpe"
    settings: Mapping[str, Any] = NOTHING
    text: str = "full"
    published: str = ""  # the row's name in the published table, if it is not the label
    invalid: str = ""  # why it is not run
    at: tuple[float, ...] = ()  # its coordinates on the axes of a figure
    line: str = ""  # the curve it belongs to, if a figure has several
    oracle: bool = False  # chooses a setting with the test labels; runs only if requested by name
    slow: bool = False  # likewise runs only if requested, since it takes hours


class Experiment(NamedTuple):
    """One table or figure."""

    title: str
    rows: tuple[Row, ...]
    table: str = ""  # its key in recipes/published.toml; `place` is for readers
    place: str = ""  # where it is in the paper
    datasets: tuple[str, ...] = ()  # benchmarks, one per column; none: the dataset given
    encoders: tuple[str, ...] = ("offline",)  # if none is given
    axes: tuple[str, ...] = ()  # of the figure: one for a curve, two for a heat map
    costs: tuple[str, ...] = ()  # columns of `tables.COSTS`; with any, cells run one at a time, to measure each cost
    note: str = ""
    views: int | None = None  # of every row, unless given; None: those of the dataset's recipe
    seeds: tuple[int, ...] = ()  # unless given; none: the protocol's
    measure: str = "scores"  # the module of this package that measures and draws it

    @property
    def heading(self) -> str:
        """Where it is in the paper, if it is there, and its title.

        >>> EXPERIMENTS["queue-size"].heading
        'Table A4: queue size M'
        """
        return f"{self.place}: {self.title[0].lower()}{self.title[1:]}" if self.place else self.title


DIFFUSION = "DiffTPT needs views from a diffusion model; make them with testtime.images.diffusion and replay them"

# every system with the prompts that it was published with; `published` is its name in the paper's tables if different
SYSTEMS = (
    Row("zero-shot", "zeroshot", text="single", published="CLIP"),
    Row("ensemble", "zeroshot", text="ensemble", published="Ensemble"),
    Row("CoOp", "zeroshot", text="learned"),
    Row("TPT", "tpt", text="single"),
    Row("DiffTPT", "difftpt", text="single", invalid=DIFFUSION),
    Row("C-TPT", "ctpt", text="single"),
    Row("TDA", "tda", text="templates"),
    Row("TPS", "tps", text="ensemble80"),
    Row("DMN-ZS", "dmn"),
    Row("DMN-ZS (oracle)", "dmn", oracle=True),
    Row("ZERO", "zero", text="single"),
    Row("MTA", "mta", text="single"),
    Row("DOTA", "dota", text="templates"),
    Row("MCP", "mcp"),
    Row("MCP (oracle)", "mcp", oracle=True),
    Row("MCP++", "mcp", settings={"residual": True}),
    Row("DLAE", "dlae"),
    Row("OGA", "oga", text="templates"),
    Row("OnZeta", "onzeta", text="ensemble"),
    Row("BCA", "bca", text="single"),
    Row("DPE"),
    Row("TPT + CoOp", "tpt", text="learned"),
    Row("DiffTPT + CoOp", "difftpt", text="learned", invalid=DIFFUSION),
    Row("DPE + CoOp", text="learned"),
)


def compared(*labels: str) -> tuple[Row, ...]:
    """The systems with these names in the paper's tables, labelled with them."""
    known = {row.published or row.label: row for row in SYSTEMS}
    return tuple(known[label]._replace(label=label, published="") for label in labels)


SIZES = (1, 2, 3, 4, 5, 6, 7)
THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0)

EXPERIMENTS: dict[str, Experiment] = {
    "ood": Experiment(
        "Robustness to natural distribution shifts",
        compared("CLIP", "Ensemble", "CoOp", "TPT", "DiffTPT", "TDA", "TPS", "DMN-ZS", "DPE"),
        "tab:ood-main", "Table 1", NATURAL, CLIPS,
        note="Published DMN-ZS chose its fusion weight with test labels; here the weight is fixed.",
    ),
    "cross": Experiment(
        "Cross-dataset generalisation", compared("CLIP", "Ensemble", "CoOp", "TPT", "DiffTPT", "TDA", "DPE"),
        "tab:fine-grained", "Table 2", CROSS, CLIPS,
    ),
    "coop": Experiment(
        "Natural distribution shifts with prompts learned by CoOp",
        compared("CoOp", "TPT + CoOp", "DiffTPT + CoOp", "DPE + CoOp"), "tab:ood-supp", "Table A1", NATURAL, CLIPS,
    ),
    "openclip-l14": Experiment(
        "Natural distribution shifts with a larger model", compared("CLIP", "TDA", "DPE"),
        "tab:ood-openclip", "Table A2", NATURAL, LARGE,
    ),
    "efficiency": Experiment(
        "Testing time, accuracy and gain",
        (Row("CLIP", "zeroshot", text="ensemble"), *compared("TPT", "DiffTPT", "TDA", "TPS", "DPE")),
        "table:efficiency", "Table 3", costs=("ms per image", "ms encoding", "time for all"),
    ),
    "update-rules": Experiment(
        "Rules by which the text prototypes evolve",
        (
            Row("none", settings={"text_update": "none"}),
            Row("full", settings={"text_update": "full"}),
            Row("exponential 0.99", settings={"text_update": "exponential", "text_decay": 0.99}),
            Row("exponential 0.95", settings={"text_update": "exponential", "text_decay": 0.95}),
            Row("cumulative", settings={"text_update": "cumulative"}),
        ),
        "table:update", "Table 4",
    ),
    "steps": Experiment(
        "Update steps of prototype residual learning",
        tuple(Row(str(steps), settings={"steps": steps}, at=(steps,)) for steps in (1, 2, 3, 4, 5)),
        "table:step", "Table 5", axes=("steps",),
    ),
    "alpha-beta": Experiment(
        "Weight (alpha) and sharpness (beta) of the visual prototypes",
        (
            *(Row(f"alpha {x}", settings={"alpha": x}, at=(x,), line="alpha") for x in (2.5, 4.0, 5.0, 6.0, 7.5, 10.0)),
            *(Row(f"beta {x}", settings={"beta": x}, at=(x,), line="beta") for x in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
        ),
        "tab:hyper", "Table A3", axes=("value",),
    ),
    "queue-size": Experiment(
        "Queue size M",
        tuple(Row(str(size), settings={"queue": size}, at=(size,)) for size in SIZES),
        "tab:ablation-M", "Table A4", axes=("M",),
        note="The paper shows Caltech101 in a figure without numbers, ImageNet in a table.",
    ),
    "tau-queue": Experiment(
        "Entropy threshold tau and queue size M",
        tuple(
            Row(f"tau {tau}, M {size}", settings={"entropy_threshold": tau, "queue": size}, at=(tau, size))
            for tau in THRESHOLDS
            for size in SIZES
        ),
        place="Figure 4, left", axes=("tau", "M"),
        note="The paper shows this as a figure on Caltech101, RN50; its text names tau 0 and 0.1, finds tau 0.1 with M "
        "3 best, and every cell with tau from 0.1 and M above 3 over 90.3%. The other values of tau are ours.",
    ),
    "learnable": Experiment(
        "Which residuals are learned",
        (
            Row("neither", settings={"lr_text": 0.0, "lr_image": 0.0}),
            Row("image", settings={"lr_text": 0.0}),
            Row("text", settings={"lr_image": 0.0}),
            Row("both"),
        ),
        "fig:ablation middle", "Figure 4, middle",
        note="The paper's figure has no numbers; its text gives the points gained over the first row.",
    ),
    "lambda": Experiment(
        "Weight lambda of the alignment loss",
        tuple(Row(str(weight), settings={"align_weight": weight}, at=(weight,)) for weight in WEIGHTS),
        place="Figure 4, right", axes=("lambda",),
        note="The paper shows a figure of three datasets without numbers; its text says that 0.5 is best, 0.23 to 1.07 "
        "points above 0. The other values of lambda are ours.",
    ),
    "components": Experiment(
        "Visual evolution (VPE), text evolution (TPE), residual learning (PRL)",
        (
            Row("none", settings={"queue": 0, "text_update": "none", "steps": 0}, published="1"),
            Row("VPE", settings={"text_update": "none", "steps": 0}, published="2"),
            Row("TPE", invalid="text evolution averages the prototypes of residual learning, and here there are none"),
            Row("PRL", settings={"queue": 0, "text_update": "none"}, published="4"),
            Row("VPE + TPE", settings={"steps": 0}, published="5"),
            Row("VPE + PRL", settings={"text_update": "none"}, published="6"),
            Row("TPE + PRL", settings={"queue": 0}, published="7"),
            Row("VPE + TPE + PRL", published="8"),
        ),
        "tab:ablation-component", "Table A5",
        note="Without residual learning there is nothing for the text prototypes to evolve to, so VPE + TPE is VPE.",
    ),
    "losses": Experiment(
        "Entropy loss and alignment loss",
        (
            Row("neither", settings={"entropy_weight": 0.0, "align_weight": 0.0}, published="1"),
            Row("entropy", settings={"align_weight": 0.0}, published="2"),
            Row("alignment", settings={"entropy_weight": 0.0}, published="3"),
            Row("both", published="4"),
        ),
        "tab:ablation-loss", "Table A6",
    ),
    "text-only": Experiment(
        "The text classifier alone: how much of the gain is prompts",
        (
            Row("a photo of a", "zeroshot", text="single"),
            Row("templates", "zeroshot", text="templates"),
            Row("descriptions", "zeroshot", text="descriptions"),
            Row("templates + descriptions", "zeroshot", text="both"),
            Row("DPE, a photo of a", text="single"),
            Row("DPE, templates", text="templates"),
            Row("DPE, templates + descriptions", text="both"),
        ),
        note="The paper does not report this baseline.",
    ),
    "tsne": Experiment(
        "What the queues hold, early and late", (Row("DPE", settings={"queue": 6}),),
        place="Figure 3", measure="queues",
    ),
    "streams": Experiment(
        "Where adapting online hurts: hard streams, with and without the guard",
        (
            Row("zero-shot", "zeroshot", text="given"),
            Row("DPE", text="given"),
            Row("TDA", "tda", text="given"),
            Row("DMN-ZS", "dmn", text="given"),
            Row("evidence", "evidence", text="given"),
            Row("DOTA", "dota", text="given", slow=True),
            Row("MCP", "mcp", text="given", slow=True),
            Row("DLAE", "dlae", text="given", slow=True),
            Row("OGA", "oga", text="given", slow=True),
            Row("OnZeta, length unknown", "onzeta", text="given",
                settings={"stream_length": 0, "lr_image": 0.05, "lr_label": 0.5}),
            Row("BCA", "bca", text="given"),
        ),
        views=1, seeds=tuple(range(1, 21)), measure="streams",
        note="Every image has one view unless --views says otherwise, and every method has the same prompts.",
    ),
    "systems": Experiment(
        "Every system: accuracy, time, memory", SYSTEMS, costs=("ms per image", "peak MB", "state MB"),
        views=1, note="Every system sees the same views, one unless --views says otherwise.",
    ),
}  # fmt: skip


def evaluation(methods: Sequence[str]) -> Experiment:
    """The methods given, with the same text prototypes: `testtime eval`."""
    return Experiment("Methods compared", tuple(Row(name, name, text="given") for name in methods))
