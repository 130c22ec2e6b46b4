"""The stores of a running Ray cluster: find, stop and restart them.

For `mooncake-serve store stop|restart`. A store that stops first writes what it holds to its disk,
if it has one; without, it loses it. Replicas compute meanwhile and attach again by themselves once
there is a store on their node's socket.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from mooncake_serve.config import StoreSettings
from mooncake_serve.errors import StoreUnavailable
from mooncake_serve.store_actor import (
    DRAIN_TIMEOUT_S,
    NAMESPACE,
    actor_name,
    start_store,
    store_names,
)

log = logging.getLogger(__name__)

HANDOVER_TIMEOUT_S = 60.0
HANDOVER_POLL_S = 0.5


def connect() -> None:
    """Join the running cluster. Raises StoreUnavailable when there is none."""
    try:
        ray.init(
            address="auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except ConnectionError as err:
        raise StoreUnavailable(
            "no Ray cluster runs here; for a store outside Ray, give its --socket"
        ) from err


def nodes() -> list[str]:
    """Ray ids of the nodes that have a store of this version's wire."""
    prefix, suffix = actor_name("*").split("*")
    return [name.removeprefix(prefix).removesuffix(suffix) for name in store_names()]


def drain(node_ids: list[str]) -> int:
    """Have these nodes' stores write to disk what they hold in memory: how many blocks in all."""
    calls: list[Any] = [
        ray.get_actor(actor_name(node_id), namespace=NAMESPACE).drain.remote(DRAIN_TIMEOUT_S)
        for node_id in node_ids
    ]
    written = 0
    for node_id, call in zip(node_ids, calls, strict=True):
        try:
            blocks: Any = ray.get(call, timeout=DRAIN_TIMEOUT_S + HANDOVER_POLL_S)
            written += blocks
        except RayError as err:
            # What is not written is computed again.
            log.warning("the store of node %s did not write all to disk: %s", node_id, err)
    return written


def stop() -> list[str]:
    """End every store of the cluster for good: the nodes that had one."""
    stopped = nodes()
    drain(stopped)
    for node_id in stopped:
        ray.kill(ray.get_actor(actor_name(node_id), namespace=NAMESPACE), no_restart=True)
    return stopped


def restart(settings: StoreSettings) -> list[str]:
    """End every store and start it anew with `settings`: the nodes. Raises StoreUnavailable."""
    restarted = stop()
    for node_id in restarted:
        _start_again(node_id, settings)
    return restarted


def _start_again(node_id: str, settings: StoreSettings) -> None:
    """Start until it works: the old process holds the socket until the kernel has ended it."""
    deadline = time.monotonic() + HANDOVER_TIMEOUT_S
    while True:
        try:
            start_store(node_id, settings)
            return
        except RayError as err:
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"no store starts on node {node_id}: {err}") from err
            time.sleep(HANDOVER_POLL_S)
