# SPDX-License-Identifier: Apache-2.0
"""deploy/: the files parse, name files and options that exist, and ask Prometheus for what the server tells."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml
from optimum.commands.register.neuron_serve import KEY_VARIABLE, NeuronServeCommand
from prometheus_client.parser import text_string_to_metric_families
from served_app import App


ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    return found


def test_files_that_the_services_mount_exist() -> None:
    services = read("compose.yaml")["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    mounts = [mount for service in services.values() for mount in service["volumes"] if mount.startswith("./")]
    assert len(mounts) == 3 and all((DEPLOY / mount.partition(":")[0]).exists() for mount in mounts)
    build = services["server"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (context / build["dockerfile"]).read_text(), re.MULTILINE)
    assert context == ROOT and copied and all((ROOT / name).exists() for line in copied for name in line.split())


def test_the_server_is_started_with_options_that_it_has_and_found_where_it_listens() -> None:
    server = read("compose.yaml")["services"]["server"]
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[0])
    assert entry[:3] == ["optimum-cli", "neuron", "serve"]
    parser = ArgumentParser()
    NeuronServeCommand.parse_args(parser)
    args = parser.parse_args([*entry[3:], *server["command"]])
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{args.port}"]}]
    assert server["ports"] == [f"127.0.0.1:{args.port}:{args.port}"] and f":{args.port}/health" in str(
        server["healthcheck"]
    )
    assert server["volumes"][0].endswith(f":{args.artifact}:ro") and list(server["environment"]) == [KEY_VARIABLE]


def test_the_dashboard_is_where_grafana_looks_and_asks_the_data_source_that_there_is() -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = read("grafana/provisioning/dashboards/dashboards.yaml")["providers"]
    mounts = read("compose.yaml")["services"]["grafana"]["volumes"]
    assert any(mount.startswith("./grafana/dashboard.json:" + provider["options"]["path"]) for mount in mounts)
    asked = [*dashboard()["panels"], *dashboard()["templating"]["list"]]
    assert {each["datasource"]["uid"] for each in asked} == {source["uid"]}


def test_the_dashboard_shows_what_the_server_tells_and_nothing_else(app: App) -> None:
    app.complete("x" * 65)  # a refusal, so that all metrics have a value
    families = text_string_to_metric_families(app.request("GET", "/metrics").text)
    told = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    shown = {name for target in targets for name in re.findall(r"optimum_neuron:\w+", target["expr"])}
    assert shown <= told.keys()
    for target in targets:
        labels = re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        names = re.findall(r"optimum_neuron:\w+", target["expr"])
        assert all(set(labels) <= told[name] for name in names), target
    # Counts and sums of histograms are in no panel, and the share of padding is shown as it is now, from tokens.
    unseen = {name for name in told if not name.endswith(("_created", "_count", "_sum"))} - shown
    assert unseen == {"optimum_neuron:graph_padding_share"}
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
