"""The dashboard and the alerts ask for metrics that the server has, in queries that are sound."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from paged.http.app import create_app
from tests.http.fakes import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/paged.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Prometheus")

_NAME = re.compile(r"\b(?:vllm:|paged:|http_|process_)\w+")
_SCRAPED = {"up"}


def queries() -> list[str]:
    """Every query of the dashboard."""
    targets = [each for panel in DASHBOARD["panels"] for each in panel.get("targets", ())]
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"][1:]]
    return [each["expr"] for each in targets] + variables


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of samples that a server has once it has served, refused and been left."""
    client = TestClient(create_app(FakeEngine(), ["tiny"]))
    client.post("/v1/completions", json={"prompt": "a", "stream": True})
    client.get("/nowhere")
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name for family in families for sample in family.samples}


@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in ALERTS)])
def test_what_is_asked_for_is_there(exported: set[str], query: str) -> None:
    names = set(_NAME.findall(query))
    assert names - exported == set()
    assert names or query.startswith("up{")


def test_every_panel_is_whole_and_none_lies_on_another() -> None:
    places: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & places, panel["title"]
        places |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["title"])


def test_variables_that_are_used_are_declared() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    declared = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert used - {"__rate_interval", "__all"} == declared


def test_alerts_say_what_they_mean() -> None:
    for rule in ALERTS:
        assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


@needs_promtool
@pytest.mark.parametrize(
    "words",
    ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"],
)
def test_prometheus_takes_them(words: str) -> None:
    done = run(*words.split(), folder=DEPLOY / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_alert_is_tried(tmp_path: Path) -> None:
    """A rule that never speaks fails its test."""
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    for rule in ALERTS:
        others = [each for each in ALERTS if each is not rule]
        rules = {"groups": [{"name": "paged", "rules": others}]}
        (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
        done = run("test", "rules", "alerts_test.yml", folder=tmp_path)
        assert done.returncode != 0, rule["alert"]


@needs_promtool
def test_the_dashboards_queries_are_sound(tmp_path: Path) -> None:
    """As rules, with the variables filled in."""
    asked = [query for query in queries() if not query.startswith("label_values")]
    rules = [
        {"record": f"a:{number}", "expr": _filled(query)} for number, query in enumerate(asked)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = run("check", "rules", "rules.yml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_exposition(exported: set[str]) -> None:
    client = TestClient(create_app(FakeEngine(), ["tiny"]))
    client.post("/v1/completions", json={"prompt": "a"})
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=client.get("/metrics").text,
        capture_output=True,
        text=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert complaints == []


def _filled(query: str) -> str:
    return query.replace("$__rate_interval", "1m").replace("$model_name", ".*")


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *words], cwd=folder, capture_output=True, text=True)
