"""The files of deploy/: they name commands, options and metrics that exist, and are well-formed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_serve_telemetry import answer

from testtime.cli.app import app
from testtime.serve.telemetry import Telemetry

DEPLOY = Path(__file__).parents[1] / "deploy"


def parse(words: list[str]) -> None:
    """Check that a testtime command and its options exist."""
    command, name = typer.main.get_command(app), "testtime"
    while hasattr(command, "commands"):
        command, name, words = command.commands[words[0]], f"{name} {words[0]}", words[1:]
    command.make_context(name, list(words))


def known_metrics() -> set[str]:
    """The names of all samples of a service that has done everything once."""
    telemetry = Telemetry()
    telemetry.answered("pets", answer(learned=False, reason="x", drift=True, label="dog"))
    telemetry.answered("pets", answer())
    telemetry.event("pets", "create")
    telemetry.request("/", "GET", 200, 0.1)
    telemetry.refused("rate")
    families = text_string_to_metric_families(telemetry.text().decode())
    return {sample.name for family in families for sample in family.samples}


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "testtime-alerts.yml").read_text())
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_only_for_metrics_that_exist(query) -> None:
    names = re.findall(r"\b(?:testtime|process)_\w+", query)
    assert names and set(names) <= known_metrics()
    for left, right in ("()", "[]", "{}"):
        assert query.count(left) == query.count(right)


def test_every_metric_of_ours_is_shown_or_watched() -> None:
    seen = set(re.findall(r"\btesttime_\w+", " ".join(queries())))
    stems = {re.sub(r"_(bucket|sum|count|created|total)$", "", name) for name in known_metrics()}
    missing = {stem for stem in stems if stem.startswith("testtime_") and not any(stem in name for name in seen)}
    assert missing <= {"testtime_batch_seconds", "testtime_request_seconds", "testtime_disagreements"}


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with lines joined and comments left out."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [(word, rest.strip()) for line in lines.splitlines() if line for word, _, rest in [line.partition(" ")]]


def test_the_dockerfile_s_commands_parse_and_its_files_exist() -> None:
    found = instructions()
    words = [word for word, _ in found]
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
             "ENTRYPOINT", "CMD"}  # fmt: skip
    assert words[0] == "FROM" and set(words) <= known
    assert words.index("USER") < words.index("ENTRYPOINT")  # it does not run as root
    for word, rest in found:
        if word == "COPY":
            for path in shlex.split(rest)[:-1]:
                assert (DEPLOY.parent / path).exists(), path
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["testtime"]
    parse(json.loads(dict(found)["CMD"]))
    _, _, check = dict(found)["HEALTHCHECK"].partition("CMD ")
    compile(json.loads(check)[2], "HEALTHCHECK", "exec")


def test_the_extras_that_are_installed_exist() -> None:
    import tomllib

    known = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("Dockerfile", "testtime.service"):
        for extras in re.findall(r"(?:\.|testtime)\[([\w,]+)\]", (DEPLOY / name).read_text()):
            assert set(extras.split(",")) <= known.keys()


def test_the_unit_starts_a_command_that_exists() -> None:
    text = (DEPLOY / "testtime.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = shlex.split(line)
    assert program.endswith("/testtime")
    parse(words)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path) -> None:
    unit = tmp_path / "testtime.service"
    text = (DEPLOY / "testtime.service").read_text()
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and "testtime.service" not in done.stderr, done.stderr


def test_prometheus_reads_where_the_service_answers() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    assert [(DEPLOY / name).exists() for name in config["rule_files"]] == [True]
