"""What the overlays' pods are given and denied: memory, disks, secrets, rights, time to stop."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import yaml

from mooncake_serve.budget import host_weights, node_budget, replicas_at_most
from tests.k8s.overlays import KUBERNETES, application, every_overlay, one, pods, size
from tests.k8s.schemas import ROOT

OTHER_PROCESSES = 1 << 30
"""Of Ray, and the ingress."""


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
