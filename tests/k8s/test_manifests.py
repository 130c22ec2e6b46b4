"""The overlays after a real kustomize build, held against schemas and against what pods need."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mooncake_serve.budget import host_weights, node_budget, replicas_at_most
from mooncake_serve.config import AppConfig, load_app_config
from tests.k8s.schemas import CRDS, MODELS, ROOT, crd_schema, model_schema, problems

OVERLAYS = {"cpu-demo": "app.yaml", "gpu": "gpu-cluster.yaml"}
KUBERNETES = "1.34"
MONITORING = ROOT / "k8s" / "components" / "monitoring"
OTHER_PROCESSES = 1 << 30
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's CRDs are not here; name them in MOONCAKE_KUBERAY_CRDS"
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The documents of a folder; kubectl's own kustomize or the tool of that name."""
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if not shutil.which(command[0]):
        pytest.skip("neither kustomize nor kubectl is installed")
    ran = subprocess.run([*command, str(folder)], capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return list(yaml.safe_load_all(ran.stdout))


@functools.cache
def built(overlay: str) -> list[dict[str, Any]]:
    return kustomize(ROOT / "k8s" / "overlays" / overlay)


def one(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in built(overlay) if document["kind"] == kind]
    return copy.deepcopy(found)


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """Pod templates of the Ray cluster and of whatever else runs, by name."""
    cluster = one(overlay, "RayService")["spec"]["rayClusterConfig"]
    found = {"head": cluster["headGroupSpec"]["template"]}
    found |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for document in built(overlay):
        if document["kind"] in {"StatefulSet", "Deployment"}:
            found[document["metadata"]["name"]] = document["spec"]["template"]
    return found


def application(overlay: str) -> AppConfig:
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    return load_app_config(config["applications"][0]["args"])


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)?", text).groups()  # pyright: ignore
    return int(number) * UNITS.get(unit, 1)


@needs_crds
@every_overlay
def test_rayservice_against_the_crd(overlay: str) -> None:
    schema = crd_schema("RayService")
    service = one(overlay, "RayService")
    assert problems(service, schema) == []
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    worker["template"]["spec"]["containers"][0]["lifecycel"] = {}
    assert problems(service, schema), "a misspelt field must be refused"


@every_overlay
def test_core_resources_against_kubernetes_schemas(overlay: str) -> None:
    checked = 0
    for document in built(overlay):
        if document["kind"] in {*MODELS, "RayService"}:
            continue
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_other_operators_resources_against_their_schemas(kind: str) -> None:
    """Each as the components have it, and refused with a misspelt field at any depth."""
    folder = ROOT / "k8s" / "components"
    documents = [
        document
        for path in sorted(folder.rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] == kind
    ]
    assert documents
    schema = model_schema(kind)
    for document in documents:
        assert problems(document, schema) == []
        for branch in branches(document["spec"]):
            branch["misspelt"] = 1
            assert problems(document, schema), branch
            del branch["misspelt"]


def branches(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that has a fixed set of fields."""
    if isinstance(value, list):
        for item in value:
            yield from branches(item)
    elif isinstance(value, dict):
        yield value
        for name, child in value.items():
            if name not in {"matchLabels", "selfSigned"}:
                yield from branches(child)


@every_overlay
def test_serve_config_is_what_ray_accepts(overlay: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = one(overlay, "RayService")["spec"]["serveConfigV2"]
    parsed = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert parsed.applications[0].import_path == "mooncake_serve.app:build"
    application(overlay)


@every_overlay
def test_only_the_address_differs_from_the_deployment(overlay: str) -> None:
    source = yaml.safe_load((ROOT / "deployments" / OVERLAYS[overlay]).read_text("utf-8"))
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    assert source["http_options"].pop("host") == "127.0.0.1"
    assert config["http_options"].pop("host") == "0.0.0.0"
    assert config == source


def test_overlays_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "k8s_config.py", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, f"run `make manifests`: {ran.stdout}"


@every_overlay
def test_cluster_shape(overlay: str) -> None:
    spec = one(overlay, "RayService")["spec"]
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert workers["replicas"] >= 2
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert spec["rayClusterDeletionDelaySeconds"] > application(overlay).api.request_timeout_s
    pinned = re.search(r"ray\[serve\]==([\d.]+)\.\*", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert cluster["rayVersion"].startswith(pinned[1])
    stop = workers["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "mooncake-serve store drain" in stop[-1]


@every_overlay
def test_every_pod_is_confined(overlay: str) -> None:
    for name, template in pods(overlay).items():
        spec = template["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"], name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "mooncake-serve", name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["limits"]["memory"], name
        if name != "head":  # Its autoscaler asks the API server.
            assert spec["automountServiceAccountToken"] is False, name


@every_overlay
def test_no_arena_in_a_volume(overlay: str) -> None:
    """The arena is a memfd inside the container's limit; a memory volume would count it twice."""
    for template in pods(overlay).values():
        for volume in template["spec"].get("volumes", []):
            assert volume.get("emptyDir", {}).get("medium") != "Memory", volume["name"]


@every_overlay
def test_the_disk_tier_has_a_volume_of_its_size(overlay: str) -> None:
    """Its directory is below a mount of the workers, on a claim with room for cap and metadata."""
    nvme = application(overlay).store.nvme
    spec = pods(overlay)["workers"]["spec"]
    claims = {
        volume["name"]: volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        for volume in spec["volumes"]
        if "ephemeral" in volume
    }
    if nvme is None:
        assert not claims
        return
    ((name, claim),) = claims.items()
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == name]
    assert not mount.get("readOnly")
    # The root of a file system holds lost+found, and the store wants a directory of its own.
    assert Path(mount["mountPath"]) in Path(nvme.path).parents
    assert nvme.bytes <= 0.95 * size(claim["resources"]["requests"]["storage"])
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@every_overlay
def test_a_drain_fits_the_grace_period(overlay: str) -> None:
    spec = pods(overlay)["workers"]["spec"]
    command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    limit = re.search(r"store drain --timeout (\d+)", command)
    assert limit is not None
    # Ray's own stop comes after it, within the same period.
    assert int(limit[1]) + 20 <= spec["terminationGracePeriodSeconds"]


@every_overlay
def test_secrets_come_from_secrets(overlay: str) -> None:
    """What the configuration names by file is in the mounted Secret; nothing is inline."""
    keys = "/etc/mooncake/keys/"
    for name in ("head", "workers"):
        spec = pods(overlay)[name]["spec"]
        mounted = {one["mountPath"]: one["name"] for one in spec["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert "secret" in volumes[mounted[keys.rstrip("/")]], name
        for variable in spec["containers"][0]["env"]:
            secret = re.search("token|secret|password|key", variable["name"], re.IGNORECASE)
            assert not secret or "valueFrom" in variable, variable["name"]
    api, peer = application(overlay).api, application(overlay).store.peer
    named = [api.keys_file, api.tenant_secret_file, api.admin_token_file, peer.token_file]
    assert all(path.startswith(keys) for path in named if path)


@every_overlay
def test_a_worker_has_room_for_the_worst_placement(overlay: str) -> None:
    """Store, every replica that its CPUs and GPUs can take, and Ray's object store.

    What is left is for Ray's own processes and the ingress.
    """
    config = application(overlay)
    (group,) = one(overlay, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = int(limits.get("nvidia.com/gpu", 0))
    replicas = replicas_at_most(config, int(limits["cpu"]), gpus)
    assert replicas >= 1
    objects = int(group["rayStartParams"]["object-store-memory"])
    budget = node_budget(config, replicas, host_weights(config), objects)
    budget.check(size(limits["memory"]) - OTHER_PROCESSES)


@every_overlay
def test_gpu_pods_have_a_host_each(overlay: str) -> None:
    (group,) = one(overlay, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    if "nvidia.com/gpu" not in limits:
        assert application(overlay).replicas.num_gpus == 0
        return
    affinity = group["template"]["spec"]["affinity"]["podAntiAffinity"]
    (rule,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels = group["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    gpus = int(limits["nvidia.com/gpu"])
    assert application(overlay).replicas.count == gpus * group["replicas"]


@every_overlay
def test_the_network_is_closed_but_for_names(overlay: str) -> None:
    policies = [document for document in built(overlay) if document["kind"] == "NetworkPolicy"]
    labels = pods(overlay)["workers"]["metadata"]["labels"]
    main = next(policy for policy in policies if policy["metadata"]["name"] == "mooncake")
    assert main["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert main["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "mooncake-serve"}}}
    for rule in main["spec"]["ingress"]:
        assert rule["from"] == [own] or {port["port"] for port in rule["ports"]} <= {
            8000,
            8265,
            8080,
            9101,
        }
    for rule in main["spec"]["egress"]:
        assert rule["to"] == [own] or {port["port"] for port in rule["ports"]} == {53}


@every_overlay
def test_every_port_is_where_it_is_said_to_be(overlay: str) -> None:
    """Prometheus scrapes and policies admit ports that containers name; statistics stay inside."""
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text("utf-8"))
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    chosen = config["controller_options"]["runtime_env"]["env_vars"]
    metrics = int(chosen["RAY_SERVE_HAPROXY_METRICS_PORT"])
    numbers = set()
    for name in ("head", "workers"):
        template = pods(overlay)[name]
        ports = {
            port["name"]: port["containerPort"]
            for port in template["spec"]["containers"][0]["ports"]
        }
        assert scraped <= ports.keys(), name
        assert ports["haproxy"] == metrics, name
        assert ports["serve"] == config["http_options"]["port"], name
        numbers |= {ports[port] for port in scraped}
        chooses = monitor["spec"]["selector"]
        labels = template["metadata"]["labels"]
        assert chooses["matchLabels"].items() <= labels.items(), name
        assert all(labels[rule["key"]] in rule["values"] for rule in chooses["matchExpressions"])
    assert admitted(overlay, "monitoring") == numbers
    assert int(chosen["RAY_SERVE_HAPROXY_STATS_PORT"]) not in {
        port["port"] for rule in ingress_rules(overlay) for port in rule.get("ports", [])
    }


def ingress_rules(overlay: str) -> list[dict[str, Any]]:
    """Of all policies."""
    policies = [document for document in built(overlay) if document["kind"] == "NetworkPolicy"]
    return [rule for policy in policies for rule in policy["spec"].get("ingress", [])]


def admitted(overlay: str, namespace: str) -> set[int]:
    """Ports of ours that pods of another namespace may reach."""
    label = {"kubernetes.io/metadata.name": namespace}
    return {
        port["port"]
        for rule in ingress_rules(overlay)
        for peer in rule["from"]
        if peer.get("namespaceSelector", {}).get("matchLabels") == label
        for port in rule["ports"]
    }


@every_overlay
def test_no_rule_admits_everybody(overlay: str) -> None:
    """A `from` that is missing or empty is the whole world, and so is an empty selector in it."""
    rules = ingress_rules(overlay)
    assert rules
    for rule in rules:
        assert rule.get("from"), rule
        for peer in rule["from"]:
            assert any(selector.get("matchLabels") for selector in peer.values()), rule


@every_overlay
def test_the_disruption_budget_is_about_the_workers(overlay: str) -> None:
    chosen = one(overlay, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay).items()}
    about = {name for name, own in labels.items() if chosen.items() <= own.items()}
    assert about == {"workers"}


def test_the_models_are_filled_into_what_the_pods_mount() -> None:
    """By a pod that is confined as ours are, but that no policy of ours keeps from the hub."""
    job = yaml.safe_load((ROOT / "k8s/overlays/gpu/fill-models.yaml").read_text("utf-8"))
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    filling, worker = job["spec"]["template"], pods("gpu")["workers"]
    assert "labels" not in filling.get("metadata", {})
    assert filling["spec"]["securityContext"] == worker["spec"]["securityContext"]
    for template in (filling, worker):
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "models"]
        claim = volumes["models"]["persistentVolumeClaim"]
        assert claim["claimName"] == one("gpu", "PersistentVolumeClaim")["metadata"]["name"]
        assert {"name": "HF_HOME", "value": mount["mountPath"]} in container["env"]
        assert bool(mount.get("readOnly")) == (template is worker)
    (container,) = filling["spec"]["containers"]
    assert container["image"] == worker["spec"]["containers"][0]["image"]
    assert container["command"][-1] == application("gpu").model.id
    assert one("gpu", "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("component", ["peer-tls", "monitoring", "redis"])
def test_components_build_on_the_demo(component: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    demo = tmp_path / "k8s" / "overlays" / "cpu-demo" / "kustomization.yaml"
    overlay = yaml.safe_load(demo.read_text("utf-8"))
    overlay["components"] = [f"../../components/{component}"]
    demo.write_text(yaml.safe_dump(overlay), "utf-8")
    documents = kustomize(demo.parent)
    assert any(document["kind"] == "RayService" for document in documents)
    if component == "peer-tls":
        service = next(one for one in documents if one["kind"] == "RayService")
        (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == {"tmp", "cache", "keys", "peer-tls"}


def test_no_secret_is_in_the_repository() -> None:
    for path in (ROOT / "k8s").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            kind = document.get("kind") if isinstance(document, dict) else None
            assert kind != "Secret", path
