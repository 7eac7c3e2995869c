"""The recipes in examples/ fit together: names, ports, labels, files.

Whether each is a valid manifest is asked of the tools that read them by the workflow
`configs/ci/recipes.yml`.
"""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
COMPOSE = ROOT / "examples" / "compose"
CONTAINER = ROOT / "examples" / "container" / "Containerfile"
ALERTS = ROOT / "configs" / "grafana" / "alerts.yml"
WORKFLOW = ROOT / "configs" / "ci" / "recipes.yml"
METRICS_PATH, HEALTH_PATH = "/metrics", "/health"


def documents(path: Path) -> dict[str, Any]:
    """Manifests by their kind."""
    found = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


SERVER = documents(KUBERNETES / "server.yaml")
POD = SERVER["Deployment"]["spec"]["template"]
CONTAINER_SPEC = POD["spec"]["containers"][0]
SERVICE = SERVER["Service"]
COMPOSED = yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))


def test_the_service_and_the_deployment_select_the_servers_pods() -> None:
    labels = POD["metadata"]["labels"].items()
    assert SERVER["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    assert SERVICE["spec"]["selector"].items() <= labels


def test_ports_are_those_that_the_server_listens_on() -> None:
    ports = {each["name"]: each["containerPort"] for each in CONTAINER_SPEC["ports"]}
    assert f"--port={ports['http']}" in CONTAINER_SPEC["args"]
    assert [each["targetPort"] for each in SERVICE["spec"]["ports"]] == ["http"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER_SPEC[probe]["httpGet"]
        assert asked == {"path": HEALTH_PATH, "port": "http"}


def test_volumes_that_are_mounted_exist() -> None:
    volumes = {each["name"]: each for each in POD["spec"]["volumes"]}
    mounted = {each["name"] for each in CONTAINER_SPEC["volumeMounts"]}
    assert mounted == volumes.keys()
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == SERVER["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_monitor_scrapes_the_service() -> None:
    monitor = documents(KUBERNETES / "service-monitor.yaml")["ServiceMonitor"]["spec"]
    labels = SERVICE["metadata"]["labels"].items()
    assert monitor["selector"]["matchLabels"].items() <= labels
    (endpoint,) = monitor["endpoints"]
    assert endpoint["path"] == METRICS_PATH
    assert endpoint["port"] in [each["name"] for each in SERVICE["spec"]["ports"]]


def test_the_rule_of_the_operator_has_the_alerts() -> None:
    """As the command in the file makes it."""
    head = (KUBERNETES / "prometheus-rule.head.yaml").read_text(encoding="utf-8")
    assert "sed 's/^/  /' configs/grafana/alerts.yml" in head
    alerts = ALERTS.read_text(encoding="utf-8")
    rule = yaml.safe_load(head + re.sub("^", "  ", alerts, flags=re.MULTILINE))
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(alerts)


def mounts(service: str) -> dict[str, Path]:
    """Paths in the container, and what is mounted there."""
    found = {}
    for each in COMPOSED["services"][service]["volumes"]:
        source, target, mode = each.split(":")
        assert mode == "ro"
        found[target] = (COMPOSE / source).resolve()
    return found


def test_compose_mounts_files_that_exist_where_they_are_looked_for() -> None:
    mounted = mounts("prometheus")
    config = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"].read_text())
    for name in config["rule_files"]:
        assert mounted[f"/etc/prometheus/{name}"] == ALERTS
    mounted = mounts("grafana")
    assert all(path.is_file() for path in mounted.values())
    providers = mounted["/etc/grafana/provisioning/dashboards/vllm-mtp.yml"]
    (provider,) = yaml.safe_load(providers.read_text())["providers"]
    dashboard = f"{provider['options']['path']}/vllm-mtp.json"
    assert mounted[dashboard] == ROOT / "configs" / "grafana" / "vllm-mtp.json"


def test_compose_services_find_each_other() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    host, port = target.split(":")
    server = COMPOSED["services"][host]
    assert f"--port={port}" in server["command"]
    assert server["ports"] == [f"{port}:{port}"]
    assert f"http://localhost:{port}{HEALTH_PATH}" in server["healthcheck"]["test"]
    source = yaml.safe_load((COMPOSE / "grafana" / "datasource.yml").read_text())
    url = source["datasources"][0]["url"]
    assert url.removeprefix("http://").split(":")[0] in COMPOSED["services"]


def test_the_container_is_built_from_a_release_that_is_supported() -> None:
    (release,) = re.findall(r"vllm-openai:v([\d.]+)", CONTAINER.read_text())
    project = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"vllm>=([\d.]+),', project)
    assert release.startswith(f"{oldest}.")
    build = COMPOSED["services"]["server"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == CONTAINER


def test_ray_of_the_ray_service_is_the_one_that_was_tested() -> None:
    cluster = documents(KUBERNETES / "ray-service.yaml")["RayService"]["spec"]
    environment = (ROOT / "configs" / "environment" / "dev.txt").read_text()
    (tested,) = re.findall(r"^ray\[.*\]==([\d.]+)$", environment, re.MULTILINE)
    assert cluster["rayClusterConfig"]["rayVersion"] == tested


def test_the_workflow_names_every_recipe() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["recipes"]["steps"]
    commands = " ".join(step.get("run", "") for step in steps)
    recipes = [
        *KUBERNETES.glob("*[a-z].yaml"),
        COMPOSE / "compose.yaml",
        COMPOSE / "prometheus.yml",
        CONTAINER,
        ALERTS,
    ]
    for each in recipes:
        # Half a manifest: a test above completes it.
        if each.name != "prometheus-rule.head.yaml":
            assert str(each.relative_to(ROOT)) in commands
