# SPDX-License-Identifier: Apache-2.0
"""deploy/: the files parse, name files and options that exist, and ask Prometheus for what the server tells."""

from __future__ import annotations

import json
import re
import subprocess
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import yaml
from optimum.commands.register.neuron_serve import DEFAULT_DRAIN, KEY_VARIABLE, NeuronServeCommand
from prometheus_client.parser import text_string_to_metric_families
from served_app import App

from optimum_neuron.tools.serve.server import LAST_READS


ROOT = Path(__file__).resolve().parents[3]
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


def stages() -> dict[str, str]:
    """The Dockerfile's stages, by their names."""
    parts = re.split(r"^FROM (\S+) AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    sources, names, texts = parts[::3], parts[1::3], parts[2::3]
    assert all(source in names[:index] or ":" in source for index, source in enumerate(sources))
    return dict(zip(names, texts, strict=True))


def entry(stage: str) -> list[str]:
    found: list[str] = json.loads(re.findall(r"^ENTRYPOINT (.*)$", stages()[stage], re.MULTILINE)[0])
    return found


def parsed(words: list[str]) -> Namespace:
    """What the command makes of a container's words."""
    assert words[:3] == ["optimum-cli", "neuron", "serve"]
    parser = ArgumentParser()
    NeuronServeCommand.parse_args(parser)
    return parser.parse_args(words[3:])


def routes(app: App) -> set[str]:
    return {route.path for route in app.app.routes}  # type: ignore[attr-defined]


def manifests(name: str) -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))
    return {document["kind"]: document for document in documents}


def test_the_server_is_started_with_options_that_it_has_and_found_where_it_listens() -> None:
    server = read("compose.yaml")["services"]["server"]
    args = parsed([*entry(server["build"]["target"]), *server["command"]])
    assert list(stages())[-1] == "server" and f"EXPOSE {args.port}" in stages()["server"]
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{args.port}"]}]
    assert server["ports"] == [f"127.0.0.1:{args.port}:{args.port}"] and f":{args.port}/health" in str(
        server["healthcheck"]
    )
    assert server["volumes"][0].endswith(f":{args.model}:ro") and list(server["environment"]) == [KEY_VARIABLE]


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


def test_sagemaker_gets_what_it_asks(app: App) -> None:
    """It runs `IMAGE serve`, with the artifact in /opt/ml/model, and asks /ping and /invocations at port 8080."""
    shell, option, line = entry("sagemaker")
    assert (shell, option) == ("sh", "-c") and line.startswith("exec ")
    ran = subprocess.run(
        [shell, option, line.replace("exec ", "exec printf '%s ' "), "serve"],
        capture_output=True,
        text=True,
        check=True,
    )
    args = parsed(ran.stdout.split())
    assert (args.model, args.host, args.port) == ("/opt/ml/model", "0.0.0.0", 8080)
    assert f"EXPOSE {args.port}" in stages()["sagemaker"] and {"/ping", "/invocations"} <= routes(app)


def test_kubernetes_starts_asks_and_ends_servers_as_they_are(app: App) -> None:
    found = manifests("server.yaml")
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    template = found["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    args = parsed([*entry("server"), *container["args"]])
    (port,) = container["ports"]
    assert port["containerPort"] == args.port == int(template["metadata"]["annotations"]["prometheus.io/port"])
    asked = {probe: container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    asked["metrics"] = {"path": template["metadata"]["annotations"]["prometheus.io/path"], "port": port["name"]}
    assert all(probe["port"] == port["name"] and probe["path"] in routes(app) for probe in asked.values())
    assert [variable["name"] for variable in container["env"]] == [KEY_VARIABLE]
    (mount,), (volume,) = container["volumeMounts"], template["spec"]["volumes"]
    assert mount["mountPath"] == args.model and mount["name"] == volume["name"]
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "1"
    # Time to be forgotten by the Service, and then for the last answers.
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert int(command[1]) + DEFAULT_DRAIN + LAST_READS < template["spec"]["terminationGracePeriodSeconds"]
    assert (
        int(read("compose.yaml")["services"]["server"]["stop_grace_period"].rstrip("s")) > DEFAULT_DRAIN + LAST_READS
    )
    labels = template["metadata"]["labels"]
    (service,) = found["Service"]["spec"]["ports"]
    assert found["Service"]["spec"]["selector"] == labels and service["targetPort"] == port["name"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels


def test_kubernetes_watches_and_scales_by_what_servers_tell(app: App) -> None:
    monitor = manifests("monitor.yaml")["ServiceMonitor"]["spec"]
    server = manifests("server.yaml")
    (endpoint,) = monitor["endpoints"]
    assert monitor["selector"]["matchLabels"] == server["Service"]["metadata"]["labels"]
    assert endpoint["path"] in routes(app) and endpoint["port"] == server["Service"]["spec"]["ports"][0]["name"]
    scaler = manifests("autoscaler.yaml")["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == server["Deployment"]["metadata"]["name"]
    assert scaler["minReplicas"] == server["Deployment"]["spec"]["replicas"]
    (rule,) = read("kubernetes/adapter-values.yaml")["rules"]["custom"]
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    (name,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert f"\n{name}{{" in app.request("GET", "/metrics").text
