"""Planned stops: nothing that was computed is lost, and no request fails because of them."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from ray import serve

from mooncake_serve.app import stores
from mooncake_serve.config import StoreSettings
from tests.e2e.cluster import BLOCK_TOKENS, App, Cluster
from tests.e2e.test_faults import Load, cached, run_while, text_of
from tests.waiting import WAIT_S, eventually

MIB = 1 << 20
WORDS = "what a planned stop must not lose, " * 12


def on_disk(cluster: Cluster, folder: Path) -> StoreSettings:
    """The application's store, with a disk."""
    nvme = {"path": str(folder), "bytes": 64 * MIB}
    return StoreSettings.model_validate({**cluster.args()["store"], "nvme": nvme})


def attached() -> dict[str, int]:
    """How often each replica has met a store; 0 while it has none."""
    handle: Any = serve.get_deployment_handle("model", "main")
    answers = handle.broadcast("stats").results(timeout_s=30)
    return {
        answer["replica"]: answer["store"]["healthy"] and answer["store"]["connects"]
        for answer in answers
    }


def test_a_store_that_is_stopped_writes_what_it_holds(
    app: App, cluster: Cluster, tmp_path: Path
) -> None:
    stores.connect()
    shipped = StoreSettings.model_validate(cluster.args()["store"])
    drained, prompt = on_disk(cluster, tmp_path), f"{uuid.uuid4()} {WORDS}"
    blocks = len(prompt) // BLOCK_TOKENS
    try:
        stores.restart(drained)

        def held() -> bool:
            """A replica computed the prompt, and the new store has all of it."""
            text_of(app.post(prompt, replica=0))
            return app.store_stats()["blocks"] >= blocks - 1

        eventually(held)
        text, before = text_of(app.post(prompt, replica=0)), attached()
        stores.restart(drained)
        assert app.store_stats()["nvme_recovered_blocks"] >= blocks - 1
        eventually(lambda: all(now > before[name] for name, now in attached().items()))
        # This replica has none of it in its own pool.
        other = app.post(prompt, replica=1)
        assert cached(other) >= (blocks - 1) * BLOCK_TOKENS
        assert text_of(other) == text
    finally:
        stores.restart(shipped)


def test_replicas_that_are_replaced_fail_no_request(app: App, cluster: Cluster) -> None:
    load, before = Load(app), set(app.replica_pids())
    changed = cluster.build(api={"request_timeout_s": WAIT_S - 2})
    assert run_while(load, lambda: cluster.deploy("main", changed)) == []
    eventually(lambda: len(app.replica_pids()) == 2 and not before & set(app.replica_pids()))
    assert load.run() == []
