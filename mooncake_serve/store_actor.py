"""The node's store inside Ray: one detached actor per node, and who restarts it when it hangs.

The actor only starts the Rust server, which runs on threads that never need the GIL. It is made by
the first replica or ingress on the node, outlives the application, and Ray restarts it when its
process dies. The first creator's settings win; later ones must agree. A store that does not answer
pings for `HUNG_AFTER_S` is killed by one of its clients, so that Ray restarts it.

A failure here never fails a request: without a store the engine computes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_serve.budget import host_weights, node_budget, replicas_at_most
from mooncake_serve.config import AppConfig, PeerConfig, StoreSettings
from mooncake_serve.errors import StoreConfigMismatch, StoreError
from mooncake_serve.memory import memory_limit, memory_total
from mooncake_serve.metrics import store_samples
from mooncake_serve.ray_metrics import RaySink, Reporter
from mooncake_serve.secret_file import read_secret
from mooncake_serve.store import NodeStore, PeerSettings, StoreServer, starting
from mooncake_serve.store.location import socket_dir, socket_path
from mooncake_serve.store.transfer_engine import TransferEngine

log = logging.getLogger(__name__)

NAMESPACE = "mooncake-serve"
WIRE_MAJOR = 2
START_TIMEOUT_S = 120.0
ATTACH_TIMEOUT_S = 10.0
HUNG_AFTER_S = 10.0
DRAIN_TIMEOUT_S = 60.0
"""For a planned stop; at the speed of a disk, most of a memory's worth."""
SUPERVISE_EVERY_S = 1.0
IDLE_CHECK_S = 5.0
MEET_EVERY_S = 1.0
ASK_PEER_S = 5.0
ASK_AGAIN_S = 30.0


def actor_name(node_id: str) -> str:
    """Another wire major is another actor, beside the old one."""
    return f"mooncake-store/{node_id}/{WIRE_MAJOR}"


class StoreActor:
    """Runs the Rust server; see the module."""

    def __init__(self, socket: str, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._cards: dict[str, dict[str, str]] = {}
        _normal_priority()
        parsed = StoreSettings.model_validate(settings)
        node_id = ray.get_runtime_context().get_node_id()
        peer = peer_settings(parsed.peer, node_id)
        self._server = StoreServer(socket=socket, peer=peer, **parsed.server_options())
        starting.start(self._server)
        for warning in self._server.warnings:
            log.warning("%s", warning)
        self._reporter = Reporter(
            RaySink({"node": node_id}), lambda: store_samples(self._server.stats())
        )
        if parsed.peer.listen:
            threading.Thread(target=self._meet_peers, args=(node_id,), daemon=True).start()
        if parsed.idle_exit_s:
            threading.Thread(
                target=self._exit_when_idle, args=(parsed.idle_exit_s,), daemon=True
            ).start()

    def settings(self) -> dict[str, Any]:
        """What the first creator asked for."""
        return self._settings

    def stats(self) -> dict[str, Any]:
        """The store's counters and gauges."""
        return self._server.stats()

    def peer_address(self) -> str | None:
        """Where other stores reach this one; None if it does not listen."""
        address = self._server.peer_address
        if address is None:
            return None
        host, port = address.rsplit(":", 1)
        every_interface = host in {"0.0.0.0", "[::]"}
        return f"{ray.util.get_node_ip_address() if every_interface else host}:{port}"

    def first_card(self, configuration: str, card: dict[str, str]) -> dict[str, str]:
        """The first card shown for a configuration; see `parity`."""
        return self._cards.setdefault(configuration, card)

    def pid(self) -> int:
        """Process of the store."""
        return self._server.pid

    def _meet_peers(self, node_id: str) -> None:
        """Find the stores of other nodes by their actors' names, as nodes come and go."""
        known: dict[str, str] = {}
        asked_all_at = time.monotonic()
        while True:
            # A store that was started again on its node may listen elsewhere, under the same name.
            again = time.monotonic() - asked_all_at >= ASK_AGAIN_S
            if again:
                asked_all_at = time.monotonic()
            try:
                found = _peer_addresses(node_id, known, again)
            except RayError as err:
                log.warning("could not look for peers: %s", err)
            else:
                if found != known:
                    log.info("peers: %s", sorted(found.values()))
                    self._server.set_peers(sorted(found.values()))
                    known = found
            time.sleep(MEET_EVERY_S)

    def drain(self, timeout_s: float) -> int:
        """Write to disk what is in memory only: how many blocks. Raises StoreError."""
        return self._server.drain(timeout_s=timeout_s)

    def _exit_when_idle(self, idle_exit_s: float) -> None:
        """Leave when nobody has been attached for that long. Every running app stays attached."""
        idle_since = time.monotonic()
        me = ray.get_runtime_context().current_actor
        while time.monotonic() - idle_since < idle_exit_s:
            time.sleep(min(IDLE_CHECK_S, idle_exit_s))
            if self._server.stats()["sessions"]:
                idle_since = time.monotonic()
        log.info("no client for %.0f s: the store exits", idle_exit_s)
        try:
            self.drain(DRAIN_TIMEOUT_S)
        except StoreError as error:
            log.warning("the store exits without having written all to disk: %s", error)
        ray.kill(me, no_restart=True)


def peer_settings(peer: PeerConfig, node_id: str) -> PeerSettings:
    """What the Rust server wants to know. Raises ConfigError for a token that cannot be read."""
    token = None
    if peer.token_file:
        token = read_secret("store.peer.token_file", peer.token_file)
    tls, engine = peer.tls, peer.transfer_engine
    return PeerSettings(
        node=node_id,
        listen=peer.listen,
        token=token,
        tls_ca=tls.ca if tls else None,
        tls_certificate=tls.certificate if tls else None,
        tls_key=tls.key if tls else None,
        tls_name=tls.name if tls else "",
        max_bytes_per_s=peer.max_bytes_per_s,
        index_bytes=peer.index,
        engine=TransferEngine(
            ray.util.get_node_ip_address(), protocol=engine.protocol, device=engine.device
        )
        if engine
        else None,
    )


def store_names() -> set[str]:
    """Names of the actors of all stores of this version's wire, on every node."""
    # Typed as Any: with all_namespaces=True these are mappings, Ray's stubs say strings.
    actors: list[Any] = list_named_actors(all_namespaces=True)
    prefix, suffix = actor_name("*").split("*")
    names = {actor["name"] for actor in actors if actor["namespace"] == NAMESPACE}
    return {name for name in names if name.startswith(prefix) and name.endswith(suffix)}


def _peer_addresses(own_node: str, known: dict[str, str], again: bool) -> dict[str, str]:
    """Addresses by actor name of all other stores; those of `known` are asked only if `again`."""
    found = {}
    for name in store_names() - {actor_name(own_node)}:
        address = known.get(name)
        if address is None or again:
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
                address = ray.get(actor.peer_address.remote(), timeout=ASK_PEER_S)
            except (RayError, ValueError) as err:
                log.info("%s does not answer yet: %s", name, err)
        if address is not None:
            found[name] = address
    return found


def check_node(config: AppConfig) -> None:
    """Raise ConfigError when this node's memory cannot hold what may come to run on it."""
    me = ray.get_runtime_context().get_node_id()
    offered = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == me)
    replicas = replicas_at_most(config, offered.get("CPU", 0), offered.get("GPU", 0))
    limit = memory_limit()
    # Ray promises itself a share of a whole machine that we never use; a container's is meant.
    contained = limit < memory_total()
    objects = int(offered.get("object_store_memory", 0)) if contained else 0
    node_budget(config, replicas, host_weights(config), objects).check(limit)


def attach(settings: StoreSettings) -> NodeStore | None:
    """The node's store, started if need be and supervised from here; None when disabled.

    Raises StoreConfigMismatch when a store runs with other settings. A store that cannot be reached
    is not an error: the returned NodeStore misses until it can be.
    """
    if not settings.enabled:
        return None
    node_id = ray.get_runtime_context().get_node_id()
    socket = socket_path(settings, node_id)
    socket_dir(settings).mkdir(mode=0o700, parents=True, exist_ok=True)
    _ensure_started(node_id, settings)
    store = NodeStore(str(socket), ingest_bytes=settings.ingest)
    store.wait_until_healthy(ATTACH_TIMEOUT_S)
    threading.Thread(
        target=_supervise, args=(store, socket), name="store-supervisor", daemon=True
    ).start()
    return store


def start_store(node_id: str, settings: StoreSettings) -> dict[str, Any]:
    """Start the store of a node unless it has one: the settings it runs with. Raises RayError."""
    remote: Any = ray.remote(StoreActor)
    actor = remote.options(
        name=actor_name(node_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(str(socket_path(settings, node_id)), settings.model_dump(mode="json"))
    return ray.get(actor.settings.remote(), timeout=START_TIMEOUT_S)


def _ensure_started(node_id: str, settings: StoreSettings) -> None:
    try:
        have = start_store(node_id, settings)
    except RayError as err:
        log.error("the node's store did not start, serving without it: %s", err)
        return
    for field, value in settings.model_dump(mode="json").items():
        # Each process may bring its own put buffer; the rest belongs to the store.
        if field != "ingest" and have.get(field) != value:
            raise StoreConfigMismatch(f"store.{field}", have.get(field), value)


def _supervise(store: NodeStore, socket: Path) -> None:
    while True:
        time.sleep(SUPERVISE_EVERY_S)
        pid = store.server_pid
        if pid is not None and store.seconds_unresponsive >= HUNG_AFTER_S:
            _kill_hung(store, pid, socket.with_suffix(".supervisor"))


def _kill_hung(store: NodeStore, pid: int, lock_path: Path) -> None:
    """End a hung store; the lock makes one of its clients do it."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = os.pidfd_open(pid)
        except (BlockingIOError, ProcessLookupError):
            return
        try:
            if store.server_pid == pid and store.seconds_unresponsive >= HUNG_AFTER_S:
                log.error("the store (pid %d) has not answered for 10 s: killing it", pid)
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _normal_priority() -> None:
    """Ray's workers run at nice +15; every replica of the node waits for this one."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.info("the store keeps Ray's niceness; set RAY_worker_niceness=0 to change it")
