"""The files of deploy/ray: Ray accepts its own, the KubeRay file has what the operator requires, commands exist.

Ray ships the schema of its launcher's file. The operator's CRDs are on no package index, so what they require is kept
here by hand: the required and the known fields of the kinds that we use, as in `ray-operator/apis/ray/v1/*_types.go`.
Pod templates are checked for what Kubernetes requires of them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_deploy import parse

DEPLOY = Path(__file__).parents[1] / "deploy" / "ray"
RAY = re.search(r"rayproject/ray:([\d.]+)", (DEPLOY / "Dockerfile").read_text())[1]  # type: ignore[index]

TEXT, COUNT, NAMES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
PARAMETERS = {"type": "object", "additionalProperties": TEXT}


def fields(required: list[str], **known: Any) -> dict[str, Any]:
    """A schema of an object: these fields, and no others."""
    return {"type": "object", "required": required, "properties": known, "additionalProperties": False}


CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "ports": {"type": "array", "items": {"type": "object", "required": ["containerPort"]}},
        "resources": fields(["requests", "limits"], requests=PARAMETERS, limits=PARAMETERS),
        "volumeMounts": {"type": "array", "items": fields(["name", "mountPath"], name=TEXT, mountPath=TEXT)},
    },
}
TEMPLATE = fields(
    ["spec"],
    metadata=NAMES,
    spec={
        "type": "object",
        "required": ["containers"],
        "properties": {
            "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
            "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        },
    },
)
HEAD = fields(["rayStartParams", "template"], rayStartParams=PARAMETERS, template=TEMPLATE, serviceType=TEXT)
GROUP = fields(
    ["groupName", "rayStartParams", "template", "minReplicas", "maxReplicas"],
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=PARAMETERS,
    template=TEMPLATE,
)
CLUSTER = fields(
    ["headGroupSpec"],
    rayVersion=TEXT,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": GROUP},
    enableInTreeAutoscaling={"type": "boolean"},
)
JOB = fields(
    ["entrypoint"],
    entrypoint=TEXT,
    clusterSelector=PARAMETERS,
    rayClusterSpec=CLUSTER,
    shutdownAfterJobFinishes={"type": "boolean"},
    backoffLimit=COUNT,
)
SPECS = {("ray.io/v1", "RayCluster"): CLUSTER, ("ray.io/v1", "RayJob"): JOB}
PLAIN = {("v1", "PersistentVolumeClaim"), ("v1", "Service")}


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def cluster() -> dict[str, Any]:
    return next(each["spec"] for each in documents() if each["kind"] == "RayCluster")


def pods() -> list[dict[str, Any]]:
    spec = cluster()
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_ray_accepts_the_launcher_s_file() -> None:
    pytest.importorskip("ray")
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="provder"):  # a mistake would be noticed
        validate_config(prepare_config(config | {"provder": {}}))


def test_the_launcher_starts_one_head_and_as_many_workers_as_there_are_machines() -> None:
    config = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    assert "--head" in " ".join(config["head_start_ray_commands"])
    assert "$RAY_HEAD_IP" in " ".join(config["worker_start_ray_commands"])


@pytest.mark.parametrize("number", range(len(documents())))
def test_a_document_for_kubernetes_has_what_its_kind_requires(number) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = documents()[number]
    kind = found["apiVersion"], found["kind"]
    assert kind in SPECS.keys() | PLAIN and re.fullmatch("[a-z0-9-]+", found["metadata"]["name"])
    if kind in SPECS:
        jsonschema.validate(found["spec"], SPECS[kind])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found["spec"] | {"entrypiont": ""}, SPECS[kind])


def test_the_version_of_ray_is_the_image_s_everywhere() -> None:
    assert cluster()["rayVersion"] == RAY


def test_jobs_and_the_service_select_the_cluster_that_is_there() -> None:
    (name,) = (each["metadata"]["name"] for each in documents() if each["kind"] == "RayCluster")
    selectors = [each["spec"]["clusterSelector"] for each in documents() if each["kind"] == "RayJob"]
    selectors += [each["spec"]["selector"] for each in documents() if each["kind"] == "Service"]
    assert len(selectors) == 3 and all(each == {"ray.io/cluster": name} for each in selectors)


def test_every_pod_mounts_the_shared_volume_at_the_same_place() -> None:
    claims = {each["metadata"]["name"] for each in documents() if each["kind"] == "PersistentVolumeClaim"}
    for pod in pods():
        volumes = {each["name"]: each for each in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            assert mounts.keys() <= volumes.keys() and mounts["shared"] == "/shared"
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] in claims


def commands() -> list[list[str]]:
    """The testtime commands in the files, as words."""
    jobs = [each["spec"]["entrypoint"] for each in documents() if each["kind"] == "RayJob"]
    comments = " ".join(line.removeprefix("#") for line in (DEPLOY / "cluster.yaml").read_text().splitlines()[:8])
    return [shlex.split(text) for text in [*jobs, *re.findall(r"'(testtime [^']+)'", comments)]]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[1])
def test_the_commands_exist_with_their_options_and_run_on_the_cluster(words) -> None:
    assert words[0] == "testtime" and words[-2:] == ["--on", "ray:auto"]
    parse(words[1:])
    assert all(path.startswith("/shared/") for path in words if path.startswith("/"))


def test_the_image_installs_extras_that_exist_from_files_that_exist() -> None:
    import tomllib

    text = (DEPLOY / "Dockerfile").read_text()
    known = tomllib.loads((DEPLOY.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r"testtime\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= known.keys() and "ray" in extras.split(",")
    for line in re.findall(r"^COPY --chown=\S+ (.+)$", text, re.MULTILINE):
        assert all((DEPLOY.parents[1] / path).exists() for path in line.split()[:-1])
