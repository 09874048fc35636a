"""`testtime plan`: the sizes of towers, the measured figures, the closed form, and the simulation that checks it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from testtime.cluster.architectures import tower
from testtime.cluster.encode import Place, _chunk
from testtime.cluster.figures import ESTIMATE, MEASURED, SCALED, figure, published, stages, utilisation
from testtime.cluster.planning import GBIT, Cluster, Job, busy, estimate
from testtime.cluster.simulation import simulate, spread
from testtime.errors import InputError
from testtime.types import ViewPlan

ROOT = Path(__file__).parents[1]
QUIET = 0.03  # closed form against the simulation, without failures: the filling and the end of the pipeline
FAILING = 0.1  # with many failures, the mean of some runs

BILLION = Job(10**9, 64, 768)
CLUSTER = Cluster(nodes=8, cores=128, gpus=64)
LARGE = published("ViT-L-14", "h200")


# Sizes


@pytest.mark.parametrize("model", ["ViT-B-32", "ViT-L-14-336", "RN50", "RN50x4"])
def test_operations_and_weights_are_those_that_torch_counts(model) -> None:
    with torch.device("meta"):
        built = open_clip.CLIP(**open_clip.get_model_config(model))
    sizes = tower(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        features = built.visual.eval()(torch.empty(1, 3, sizes.size, sizes.size, device="meta"))
    assert sizes.flops == counter.get_total_flops()
    assert sizes.dim == features.shape[1]
    assert sizes.weights == pytest.approx(sum(part.numel() for part in built.parameters()), rel=0.01)


def test_a_model_may_be_named_as_an_encoder_is() -> None:
    assert tower("open_clip:ViT-B-16/openai") == tower("ViT-B-16")
    assert published("ViT-B-16@float16", "h200").encode == published("ViT-B-16", "h200").encode
    with pytest.raises(InputError, match="leave out @float8, or measure with --here"):
        published("ViT-B-16@float8", "h200")


@pytest.mark.parametrize(
    "model, way_out", [("ViT-B-61", "ViT-B-16"), ("ViT-B-16-SigLIP", "--here"), ("tiny", "--here")]
)
def test_a_model_of_unknown_size_is_refused_with_a_way_out(model, way_out) -> None:
    with pytest.raises(InputError, match=way_out):
        tower(model)


# Figures


@pytest.mark.parametrize("name", stages()["figures"])
def test_every_figure_is_in_the_file_that_it_names(name) -> None:
    found = stages()["figures"][name]
    value = json.loads((ROOT / stages()["sources"][found["source"]]["file"]).read_text())["results"]
    for key in found["entry"]:
        value = value[key]
    assert found["value"] == value and found["unit"] in ("ms", "s", "bytes")


def test_every_source_says_where_when_and_how() -> None:
    for source in stages()["sources"].values():
        assert source.keys() == {"machine", "command", "date", "file"} and all(source.values())
        assert (ROOT / source["command"].split()[1]).is_file()


def test_another_model_is_scaled_at_the_measured_utilisation_and_another_gpu_is_an_estimate() -> None:
    base, large, rented = published("ViT-B-16", "h200"), LARGE, published("ViT-L-14", "a100")
    assert (base.kind("encode"), large.kind("encode"), rented.kind("encode")) == (MEASURED, SCALED, ESTIMATE)
    assert base.encode == figure("encode, ViT-B-16") / 64
    assert large.encode / base.encode == pytest.approx(tower("ViT-L-14").flops / tower("ViT-B-16").flops)
    assert any("scaled from ViT-B-16" in line for line in large.notes)
    assert rented.encode / large.encode == pytest.approx(989 / 312)
    assert any(line.startswith("estimate: a100 was not measured") for line in rented.notes)
    assert 0.3 < utilisation("ViT-B-16") < 0.6  # of a peak that nothing reaches
    assert published("ViT-B-16-quickgelu", "h200").kind("encode") == MEASURED


def test_the_stages_add_up_to_what_whole_commands_took_on_the_same_gpu() -> None:
    measured = json.loads((ROOT / "benchmarks/results/h200-commands.json").read_text())["results"]["commands"]
    for augmix, name in ((False, "run, crops"), (True, "run, AugMix")):
        job, machine = Job(600, 64, 512, augmix), Cluster(nodes=1, cores=4, gpus=1)
        pace = estimate(job, machine, published("ViT-B-16", "h200", augmix)).pace
        assert 1000 * pace == pytest.approx(measured[name], rel=0.1)


# The closed form


def test_the_pace_is_that_of_the_busiest_resource() -> None:
    found = estimate(BILLION, CLUSTER, LARGE)
    gpu = 64 * (LARGE.views + LARGE.encode) / 64
    assert found.pace == pytest.approx(gpu) and found.binding.stage == "encode"
    assert found.quiet_seconds == pytest.approx(1e9 * gpu, rel=1e-3)
    assert found.gpu_hours == pytest.approx(64 * found.seconds / 3600)
    assert BILLION.images * BILLION.feature_bytes == 10**9 * 64 * 768 * 2


@pytest.mark.parametrize(
    "cluster, stage",
    [
        (replace(CLUSTER, read=0.5 * GBIT), "read"),
        (replace(CLUSTER, cores=0.5), "decode"),
        (replace(CLUSTER, write=0.5 * GBIT), "write"),
        (CLUSTER, "encode"),
    ],
)
def test_what_there_is_too_little_of_binds(cluster, stage) -> None:
    assert estimate(BILLION, cluster, LARGE).binding.stage == stage


def test_drawing_views_binds_where_the_gpu_is_fast() -> None:
    found = estimate(BILLION, replace(CLUSTER, gpus=1, nodes=1), replace(LARGE, encode=0.0))
    assert (found.binding.stage, found.binding.resource) == ("views", "worker threads")


def test_larger_images_take_as_much_longer_to_read_and_decode() -> None:
    small, large = (estimate(replace(BILLION, image_bytes=size), CLUSTER, LARGE) for size in (5e4, 5e5))
    assert busy(large.loads)["CPU cores"] == pytest.approx(10 * busy(small.loads)["CPU cores"])


def test_half_the_views_halve_the_time_and_the_features_and_float32_doubles_only_these() -> None:
    node = replace(CLUSTER, gpus=8, nodes=1)
    whole, half = estimate(BILLION, node, LARGE), estimate(replace(BILLION, views=32), node, LARGE)
    wide = estimate(replace(BILLION, dtype="float32"), node, LARGE)
    assert half.seconds == pytest.approx(whole.seconds / 2, rel=1e-3)
    assert wide.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert wide.job.feature_bytes == 2 * whole.job.feature_bytes == 4 * half.job.feature_bytes


def test_tasks_are_whole() -> None:
    job = replace(BILLION, images=64 * CLUSTER.task_images(BILLION), shard=1)
    even, odd = (estimate(replace(job, images=n), CLUSTER, LARGE).quiet_seconds for n in (job.images, job.images + 16))
    assert odd - LARGE.startup == pytest.approx(2 * (even - LARGE.startup), rel=0.01)  # one more, and the others wait


@pytest.mark.parametrize("gpus, cpus", [(2, 1), (0, 8)])
def test_tasks_are_as_large_as_those_of_encode(gpus: int, cpus: int) -> None:
    place = Place(2, "cuda" if gpus else "cpu", cpus, gpus // 2)
    for views in (1, 8, 64, 2000):
        planned = Cluster(nodes=2, cores=8, gpus=gpus).task_images(Job(10**6, views, 512))
        assert planned == _chunk(10**6, ViewPlan(count=views), place)


def test_one_thread_writes_however_many_gpus_there_are() -> None:
    few, many = (estimate(BILLION, replace(CLUSTER, gpus=n, nodes=n // 8), LARGE) for n in (64, 256))
    assert (few.binding.stage, many.binding.stage) == ("encode", "write")
    assert many.pace == BILLION.feature_bytes / LARGE.write


def test_failures_cost_the_tasks_in_progress_and_the_repair() -> None:
    quiet = estimate(BILLION, CLUSTER, LARGE)
    failing = estimate(BILLION, replace(CLUSTER, node_mtbf=100.0), LARGE)
    assert quiet.failures == quiet.lost_seconds == 0
    assert failing.failures == pytest.approx(8 * failing.seconds / 3600 / 100)
    assert failing.repeated_tasks == pytest.approx(8 * failing.failures)  # a node has eight workers
    assert failing.restarts == pytest.approx(failing.failures / 8)  # of the command's own machine
    assert failing.seconds - failing.quiet_seconds == pytest.approx(failing.lost_seconds / 64)
    with pytest.raises(InputError, match="fail less often"):
        estimate(BILLION, replace(CLUSTER, node_mtbf=0.1), LARGE)


# The simulation


@pytest.mark.parametrize(
    "job, cluster",
    [
        (BILLION, CLUSTER),
        (BILLION, replace(CLUSTER, read=0.5 * GBIT)),
        (BILLION, replace(CLUSTER, cores=0.5)),
        (BILLION, replace(CLUSTER, write=0.5 * GBIT)),
        (replace(BILLION, images=10**6, shard=100), CLUSTER),
        (replace(BILLION, images=10**5, shard=100), Cluster(nodes=1, cores=16, gpus=1)),
    ],
    ids=["encode", "read", "decode", "write", "a million", "one GPU"],
)
def test_the_closed_form_agrees_with_the_simulation_when_nothing_fails(job, cluster) -> None:
    found = simulate(job, cluster, LARGE)
    assert found.failures == found.repeated_images == 0
    assert estimate(job, cluster, LARGE).seconds == pytest.approx(found.seconds, rel=QUIET)


def test_cpu_workers_are_simulated_too() -> None:
    figures = replace(LARGE, on_gpu=False, draw=0.0, views=0.001, encode=0.1)
    job, cluster = Job(100_000, 4, 512, shard=100), Cluster(nodes=4, cores=8)
    found = estimate(job, cluster, figures)
    assert found.binding.resource == "CPU cores"
    assert simulate(job, cluster, figures).seconds == pytest.approx(found.seconds, rel=QUIET)


@pytest.mark.parametrize("kind", ["node_mtbf", "worker_mtbf"])
def test_failures_delay_the_simulation_as_much_as_the_closed_form(kind) -> None:
    job, cluster = replace(BILLION, images=10**8), replace(CLUSTER, **{kind: 5.0}, repair=1800.0)
    closed, runs = estimate(job, cluster, LARGE), [simulate(job, cluster, LARGE, seed=seed) for seed in range(5)]
    quiet = simulate(job, CLUSTER, LARGE).seconds
    mean = sum(run.seconds for run in runs) / 5
    assert all(run.seconds > quiet and run.failures and run.repeated_images for run in runs)
    assert closed.seconds == pytest.approx(mean, rel=FAILING)
    assert closed.failures == pytest.approx(sum(run.failures for run in runs) / 5, rel=0.5)


def test_stragglers_cost_their_share_of_the_work_and_no_more() -> None:
    job = replace(BILLION, images=10**8)
    quiet = simulate(job, CLUSTER, LARGE).seconds
    found = spread(job, CLUSTER, LARGE, stragglers=0.1, runs=5)
    assert 1.02 < found.p50 / quiet < 1.10  # a tenth at half speed: a twentieth less work is done
    assert found.p50 <= found.p95


def test_a_seed_gives_the_same_run_again_and_another_seed_another() -> None:
    job, cluster = replace(BILLION, images=10**7), replace(CLUSTER, node_mtbf=5.0)
    first, again, other = (simulate(job, cluster, LARGE, seed=seed, stragglers=0.1) for seed in (1, 1, 2))
    assert first == again != other


# The command

BASE = ("plan", "--images", "1e9", "--model", "ViT-L-14", "--gpus", "64")


def test_the_tables_fit_80_columns_and_say_what_is_scaled(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli(*BASE[:-1], "8", "--simulate")
    assert outcome.code == 0 and all(len(line) <= 80 for line in outcome.out.splitlines())
    for text in ("GPU-hours", "stage that binds", "encode (GPUs)", "98.3 TB", "p95", "scaled", "A100 (estimate)"):
        assert text in outcome.out
    assert "scaled from ViT-B-16" in outcome.err and "benchmarks/results/h200-parts.json" in outcome.err


def test_json_holds_what_the_tables_say(cli) -> None:
    found = json.loads(cli(*BASE, "--json").out)
    assert found["cost"]["binds"] == "encode" and found["cluster"]["nodes"] == 8 and found["cluster"]["read"] is None
    assert found["cost"]["feature_bytes"] == 10**9 * 64 * 768 * 2
    assert {"32 views", "stored as float32", "128 GPUs, 16 nodes", "A100 (estimate)"} <= found["changes"].keys()
    assert found["simulated"] is None and found["figures"]["kinds"]["encode"] == "scaled"


def test_markdown_has_a_table_for_each_part(cli) -> None:
    printed = cli(*BASE, "--markdown").out
    assert printed.startswith("# 1,000,000,000 images x 64 views, ViT-L-14, 64 x H200 in 8 nodes of 128 cores\n")
    assert printed.count("| --- |") == 3 and "| as planned |" in printed


@pytest.mark.parametrize(
    "words, told",
    [
        (("--images", "many"), "--images many"),
        (("--images", "0"), "--images 0"),
        (("--images", "1.5"), "--images 1.5"),
        (("--images", "10", "--views", "0"), "views=0"),
        (("--images", "10", "--gpus", "0"), "--gpus 0"),
        (("--images", "10", "--gpus", "-2"), "--gpus -2"),
        (("--images", "10", "--gpu", "h20"), "Did you mean 'h200'"),
        (("--images", "10", "--dtype", "float61"), "Did you mean 'float16'"),
        (("--images", "10", "--gpus", "4", "--nodes", "8"), "--nodes 8"),
        (("--images", "10", "--cpus-per-node", "0"), "--cpus-per-node 0"),
        (("--images", "10", "--read-gbps", "nan"), "--read-gbps nan"),
        (("--images", "10", "--image-bytes", "-1"), "--image-bytes -1"),
        (("--images", "10", "--shard", "0"), "--shard 0"),
        (("--images", "10", "--mtbf", "0"), "--mtbf 0"),
        (("--images", "10", "--stragglers", "101"), "--stragglers 101"),
        (("--images", "10", "--repair", "-1"), "--repair -1"),
        (("--images", "10", "--json", "--markdown"), "give one of the two"),
        (("--images", "10", "--sample", "photos"), "--sample needs --here"),
        (("--images", "10", "--model", "ViT-e-14", "--gpu", "t4", "--mtbf", "0.001"), "fail less often"),
        (("--images", "10", "--here", "--gpus", "2", "--model", "tiny", "--device", "cpu"), "on its CPU"),
    ],
)
def test_senseless_values_are_refused(cli, words, told) -> None:
    outcome = cli("plan", *words)
    assert outcome.code == 2 and told in outcome.err


def test_here_measures_every_stage_of_this_machine(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    words = ("--model", "tiny", "--views", 4, "--device", "cpu", "--seconds", 0.3, "--sample", "photos", "--json")
    found = json.loads(cli("plan", "--here", "--images", 100, *words).out)
    figures = found["figures"]
    assert all(figures[stage] > 0 for stage in ("read", "decode", "views", "encode", "write", "startup"))
    assert not figures["on_gpu"] and found["job"]["dim"] == 32 and found["cluster"]["gpus"] == 0
    assert figures["image_bytes"] == sum(path.stat().st_size for path in (tmp_path / "photos").iterdir()) / 3
    assert found["cost"]["seconds"] > figures["startup"] and math.isfinite(found["cost"]["seconds"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]  # nothing is left behind
