# SPDX-License-Identifier: Apache-2.0
"""deploy/: the files parse, name files and options that exist, and ask Prometheus for what the server shows."""

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
from served_app import NAME, App

from optimum_neuron.tools.serve.server import LAST_READS


ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
# The Dockerfile's stages, by their names, and their images.
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
_PARTS = re.split(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
STAGES = dict(zip(_PARTS[1::3], _PARTS[2::3], strict=True))
IMAGES = dict(zip(_PARTS[1::3], _PARTS[::3], strict=True))


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def entry(stage: str) -> list[str]:
    found: list[str] = json.loads(re.findall(r"^ENTRYPOINT (.*)$", STAGES[stage], re.MULTILINE)[0])
    return found


def parsed(words: list[str]) -> Namespace:
    """Return what the command makes of a container's words."""
    assert words[:3] == ["optimum-cli", "neuron", "serve"]
    parser = ArgumentParser()
    NeuronServeCommand.parse_args(parser)
    return parser.parse_args(words[3:])


def routes(app: App) -> set[str]:
    return {route.path for route in app.app.routes}  # type: ignore[attr-defined]


def manifests(name: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def test_services_mount_files_that_exist_and_start_the_server_with_options_that_it_has() -> None:
    assert set(SERVICES) == {"server", "prometheus", "grafana"}
    mounts = [mount for service in SERVICES.values() for mount in service["volumes"] if mount.startswith("./")]
    assert len(mounts) == 3 and all((DEPLOY / mount.partition(":")[0]).exists() for mount in mounts)
    build = SERVICES["server"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT and context / build["dockerfile"] == DEPLOY / "Dockerfile"
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    assert copied and all((ROOT / name).exists() for name in copied)
    assert {f"!{name}" for name in copied} < {*(ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()}
    server = SERVICES["server"]
    args = parsed([*entry(server["build"]["target"]), *server["command"]])
    assert list(STAGES)[-1] == "server" and f"EXPOSE {args.port}" in STAGES["server"]
    (job,) = read("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{args.port}"]}]
    assert server["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    assert server["volumes"][0].endswith(f":{args.model}:ro") and list(server["environment"]) == [KEY_VARIABLE]


def test_an_image_is_pinned_asks_its_server_for_health_and_is_no_root(app: App) -> None:
    pins = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    tested = dict(re.findall(r"^(\w+) \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert re.fullmatch(r"3\.\d+\.\d+", pins.pop("PYTHON")) and pins == {name: tested[name] for name in pins}
    assert {each for each in IMAGES.values() if each not in STAGES} == {
        "python:${PYTHON}-bookworm", "python:${PYTHON}-slim-bookworm",
    }  # fmt: skip
    installs = re.findall(r"^RUN pip install (.*)$", STAGES["base"], re.MULTILINE)
    assert [line.count('"torch==${TORCH}"') for line in installs] == [1, 1]
    assert installs[0].endswith("--index-url https://download.pytorch.org/whl/cpu")
    assert '"transformers==${TRANSFORMERS}"' in installs[1]
    (user,) = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in STAGES["base"] and int(user) > 0
    for stage, base in IMAGES.items():
        asked = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", re.sub(r"(?s).*HEALTHCHECK", "", STAGES[stage]))
        assert len(asked) == (base == "base"), stage
        assert all(f"EXPOSE {port}\n" in STAGES[stage] and path in routes(app) for port, path in asked)


def test_the_dashboard_shows_what_the_server_has_and_nothing_else(app: App) -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = read("grafana/provisioning/dashboards/dashboards.yaml")["providers"]
    mounted = "./grafana/dashboard.json:" + provider["options"]["path"]
    assert any(mount.startswith(mounted) for mount in SERVICES["grafana"]["volumes"])
    asked = [*DASHBOARD["panels"], *DASHBOARD["templating"]["list"]]
    assert {each["datasource"]["uid"] for each in asked} == {source["uid"]}
    app.complete("x" * 65)  # a refusal, so that all metrics have a value
    answer = app.request("GET", "/metrics")
    families = text_string_to_metric_families(answer.text)
    samples = [sample for family in families for sample in family.samples]
    known = {sample.name: set(sample.labels) for sample in samples}
    assert answer.headers["content-type"].startswith("text/plain") and len(samples) > 15
    assert all(each.labels["model_name"] == NAME and each.name.startswith("optimum_neuron:") for each in samples)
    shown: set[str] = set()
    for target in (target for panel in DASHBOARD["panels"] for target in panel["targets"]):
        labels = re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        names = re.findall(r"optimum_neuron:\w+", target["expr"])
        assert all(set(labels) <= known[name] for name in names), target
        shown.update(names)
    # Counts and sums of histograms are in no panel.
    assert not {name for name in known if not name.endswith(("_created", "_count", "_sum"))} - shown


def test_sagemaker_gets_what_it_asks(app: App) -> None:
    """It runs `IMAGE serve`, with the artifact in /opt/ml/model, and asks /ping and /invocations at port 8080."""
    shell, option, line = entry("sagemaker")
    assert (shell, option) == ("sh", "-c") and line.startswith("exec ")
    command = [shell, option, line.replace("exec ", "exec printf '%s ' "), "serve"]
    args = parsed(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert (args.model, args.host, args.port) == ("/opt/ml/model", "0.0.0.0", 8080)
    assert f"EXPOSE {args.port}" in STAGES["sagemaker"] and {"/ping", "/invocations"} <= routes(app)


def test_kubernetes_starts_asks_watches_scales_and_ends_servers_as_they_are(app: App) -> None:
    found = manifests("server.yaml")
    template = found["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    args = parsed([*entry("server"), *container["args"]])
    (port,) = container["ports"]
    notes = template["metadata"]["annotations"]
    assert port["containerPort"] == args.port == int(notes["prometheus.io/port"])
    asked = [container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    asked.append({"path": notes["prometheus.io/path"], "port": port["name"]})
    assert all(probe["port"] == port["name"] and probe["path"] in routes(app) for probe in asked)
    assert [variable["name"] for variable in container["env"]] == [KEY_VARIABLE]
    (mount,), (volume,) = container["volumeMounts"], template["spec"]["volumes"]
    assert mount["mountPath"] == args.model and mount["name"] == volume["name"]
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "1"
    # Time to be forgotten by the Service, and then for the last answers.
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    last = DEFAULT_DRAIN + LAST_READS
    assert sleep == "sleep" and int(seconds) + last < template["spec"]["terminationGracePeriodSeconds"]
    assert int(SERVICES["server"]["stop_grace_period"].rstrip("s")) > last
    labels = template["metadata"]["labels"]
    (service,) = found["Service"]["spec"]["ports"]
    assert found["Service"]["spec"]["selector"] == labels and service["targetPort"] == port["name"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert found[kind]["spec"]["selector"]["matchLabels"] == labels
    monitor = manifests("monitor.yaml")["ServiceMonitor"]["spec"]
    (endpoint,) = monitor["endpoints"]
    assert monitor["selector"]["matchLabels"] == found["Service"]["metadata"]["labels"]
    assert endpoint["path"] in routes(app) and endpoint["port"] == service["name"]
    scaler = manifests("autoscaler.yaml")["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert scaler["minReplicas"] == found["Deployment"]["spec"]["replicas"]
    (rule,) = read("kubernetes/adapter-values.yaml")["rules"]["custom"]
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    (name,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert f"\n{name}{{" in app.request("GET", "/metrics").text
