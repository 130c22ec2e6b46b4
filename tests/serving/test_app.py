"""A configuration that cannot be served is found before anything is deployed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray import serve

import mooncake_serve.app as product
from mooncake_serve import store_actor
from mooncake_serve.app import terminal
from mooncake_serve.app.machine import check_machine
from mooncake_serve.budget import host_weights, node_budget, replicas_at_most
from mooncake_serve.config import GIB, AppConfig, load_app_config
from mooncake_serve.errors import ConfigError
from mooncake_serve.memory import memory_limit

SERVE_RUN = ["/venv/bin/python3", "/venv/bin/serve", "run", "app.yaml"]


def config(**sections: dict[str, Any]) -> AppConfig:
    return load_app_config(sections)


@pytest.mark.parametrize(
    ("sections", "limit", "field"),
    [
        ({"store": {"dram": "8GiB"}}, 4 * GIB, "store.dram"),
        ({"store": {"dram": "2GiB"}, "engine": {"pool": "1GiB"}}, 4 * GIB, "engine.pool"),
        ({"replicas": {"count": 1, "max_per_node": 3}}, 6 * GIB, "engine.pool"),
        ({"engine": {"threads": 256}}, 64 * GIB, "engine.threads"),
    ],
)
def test_what_does_not_fit_is_named(sections: dict[str, Any], limit: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_machine(config(**sections), limit=limit)
    assert caught.value.field == field


def test_a_container_holds_the_sum_of_its_parts() -> None:
    sizes = {"store": {"dram": "2GiB"}, "engine": {"pool": "1GiB"}, "replicas": {"count": 8}}
    app = config(**sizes)
    most = replicas_at_most(app, cpus=1, gpus=0)
    assert most == 2
    budget = node_budget(app, most, GIB // 4, GIB)
    assert budget.total == 6.5 * GIB
    budget.check(budget.total)
    named = r"2 replicas of 1.8GiB \(0.2GiB of it weights\).*object store \(1.0GiB\) need 6.5GiB"
    with pytest.raises(ConfigError, match=rf"{named}.*allows 6.0GiB"):
        budget.check(6 * GIB)
    on_gpu = config(replicas={"count": 8, "num_gpus": 1}, engine={"device": "cuda"})
    assert replicas_at_most(on_gpu, cpus=48, gpus=4) == 4
    assert host_weights(on_gpu) == 0
    assert node_budget(on_gpu, 4, 0).replica == GIB // 2


def test_replicas_that_serve_adds_are_counted() -> None:
    """Serve may scale beyond `count`, up to `max_per_node` and to what the node offers."""
    scaled = config(replicas={"count": 2, "max_per_node": 6, "num_cpus": 0.5})
    assert replicas_at_most(scaled, cpus=16, gpus=0) == 6
    assert replicas_at_most(scaled, cpus=2, gpus=0) == 4
    free = config(replicas={"count": 2, "max_per_node": 6, "num_cpus": 0})
    assert replicas_at_most(free, cpus=1, gpus=0) == 6


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model's folder with half a GiB of bfloat16 in two files, which take no disk."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        size = GIB // 4
        tensor = {"dtype": "BF16", "shape": [size // 1024, 512], "data_offsets": [0, size]}
        header = json.dumps({name: tensor}).encode()
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    return tmp_path


def test_weights_are_counted_as_they_are_loaded(weights: Path) -> None:
    model = {"id": str(weights)}
    assert host_weights(config(model=model)) == GIB // 2
    assert host_weights(config(model={**model, "dtype": "float32"})) == GIB
    for path in weights.glob("*.safetensors"):
        path.unlink()
    assert host_weights(config(model=model)) == 0


@pytest.mark.parametrize("contained", [True, False])
def test_a_node_is_refused_before_anything_is_reserved(
    monkeypatch: pytest.MonkeyPatch, weights: Path, contained: bool
) -> None:
    """Store 2, two replicas of 1/2 + 1 + 1/2 GiB, and, in a container, 1 GiB of Ray's objects."""
    offered = {"CPU": 1.0, "object_store_memory": float(GIB)}
    nodes = [{"NodeID": "other", "Resources": {}}, {"NodeID": "me", "Resources": offered}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "me")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    app = config(
        model={"id": str(weights)},
        store={"dram": "2GiB"},
        engine={"pool": "1GiB"},
        replicas={"count": 8, "num_cpus": 0.45},
    )
    need = (7 if contained else 6) * GIB

    def limit(size: int) -> None:
        monkeypatch.setattr(store_actor, "memory_limit", lambda: size)
        monkeypatch.setattr(store_actor, "memory_total", lambda: size + GIB * contained)

    limit(need)
    store_actor.check_node(app)
    limit(need - 1)
    with pytest.raises(ConfigError) as caught:
        store_actor.check_node(app)
    assert caught.value.field == "engine.pool"
    said = str(caught.value)
    for part in ("store (2.0GiB)", "2 replicas of 2.0GiB (0.5GiB of it weights)"):
        assert part in said
    assert ("object store (1.0GiB)" in said) == contained
    assert f"need {need // GIB}.0GiB" in said


def test_what_fits_is_taken() -> None:
    sizes = {"store": {"dram": "2GiB"}, "engine": {"pool": "1GiB"}}
    check_machine(config(**sizes), limit=6 * GIB)
    off = {"store": {"dram": "8GiB", "enabled": False}, "engine": {"pool": "1GiB"}}
    check_machine(config(**off), limit=4 * GIB)


@pytest.mark.parametrize(
    ("cgroups", "files", "limit"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4096"}, 4096),
        ("0::/a", {"a/memory.max": "8192", "memory.max": "4096"}, 4096),
        ("0::/of/the/host", {"memory.max": "4096"}, 4096),
        ("5:cpu:/a\n4:hugetlb,memory:/a", {"memory/a/memory.limit_in_bytes": "4096"}, 4096),
        ("0::/a", {"a/memory.max": "max"}, None),
        ("0::/", {}, None),
    ],
)
def test_the_least_cgroup_limit_counts(
    tmp_path: Path, cgroups: str, files: dict[str, str], limit: int | None
) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    own.write_text(cgroups)
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit(own, mount) == (limit or physical)


class Process:
    """A parent process."""

    def __init__(self, *command: str, deaf_to: tuple[signal.Signals, ...] = ()) -> None:
        self._command = list(command)
        self._deaf_to = deaf_to
        self.signals: list[signal.Signals] = []

    def cmdline(self) -> list[str]:
        return self._command

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def terminate(self) -> None:
        self.signals.append(signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        if self.signals[-1] in self._deaf_to:
            raise psutil.TimeoutExpired(timeout)


@pytest.fixture
def ancestors(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Parents of this worker, and a Serve that serves nothing yet."""
    chain = [Process("raylet"), Process(*SERVE_RUN), Process("bash")]
    monkeypatch.setattr(Process, "parents", lambda self: chain, raising=False)
    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(terminal, "LOG_DELAY_S", 0)
    serving(monkeypatch, deployments={})
    return chain


def serving(monkeypatch: pytest.MonkeyPatch, deployments: dict[str, str]) -> None:
    status = SimpleNamespace(applications={"mooncake": SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(serve, "status", lambda: status)


BAD = {"engine": {"colour": "red"}}


def test_a_bad_configuration_ends_serve_run(
    ancestors: list[Process], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.colour"):
        product.build(BAD)
    assert [parent.signals for parent in ancestors] == [[], [signal.SIGHUP], []]
    assert "mooncake-serve: engine.colour: unknown setting" in capsys.readouterr().err


def test_under_nohup_too(ancestors: list[Process]) -> None:
    ancestors[1] = Process(*SERVE_RUN, deaf_to=(signal.SIGHUP,))
    with pytest.raises(ConfigError):
        product.build(BAD)
    assert ancestors[1].signals == [signal.SIGHUP, signal.SIGTERM]


@pytest.mark.parametrize(
    "command", [["bash"], ["python3", "/venv/bin/mooncake-serve", "serve", "a.yaml"], ["serve"], []]
)
def test_no_other_process_is_touched(ancestors: list[Process], command: list[str]) -> None:
    ancestors[1] = Process(*command)
    with pytest.raises(ConfigError):
        product.build(BAD)
    assert [parent.signals for parent in ancestors] == [[], [], []]


def test_a_server_that_serves_is_not_ended(
    ancestors: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, deployments={"model": "HEALTHY"})
    with pytest.raises(ConfigError):
        product.build(BAD)
    assert ancestors[1].signals == []
