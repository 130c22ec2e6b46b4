"""Planned stops: nothing that was computed is lost, and no request fails because of them."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from mooncake_serve.app import stores
from mooncake_serve.config import StoreSettings
from tests.e2e.cluster import BLOCK_TOKENS, App, Cluster
from tests.e2e.test_faults import Load, cached, run_while, text_of
from tests.waiting import WAIT_S, eventually

MIB = 1 << 20
PROMPTS = 12
ATTACH_S = 1.0
"""Between two looks whether a replica has found the new store."""
WORDS = "what a planned stop must not lose, " * 12


def on_disk(cluster: Cluster, folder: Path) -> StoreSettings:
    """The application's store, with a disk."""
    nvme = {"path": str(folder), "bytes": 64 * MIB}
    return StoreSettings.model_validate({**cluster.args()["store"], "nvme": nvme})


def test_a_store_that_is_stopped_writes_what_it_holds(
    app: App, cluster: Cluster, tmp_path: Path
) -> None:
    stores.connect()
    shipped = StoreSettings.model_validate(cluster.args()["store"])
    drained = on_disk(cluster, tmp_path)
    prompts = [f"{uuid.uuid4()} {WORDS}" for _ in range(PROMPTS)]
    blocks = len(prompts[0]) // BLOCK_TOKENS - 1
    try:
        stores.restart(drained)

        def held() -> bool:
            """One replica computed all prompts, and the new store has them."""
            for prompt in prompts:
                text_of(app.post(prompt, replica=0))
            return app.store_stats()["blocks"] >= blocks * PROMPTS

        eventually(held)
        texts = {prompt: text_of(app.post(prompt, replica=0)) for prompt in prompts}
        stores.restart(drained)
        assert app.store_stats()["nvme_recovered_blocks"] >= blocks * PROMPTS
        unasked = iter(prompts)

        def loaded() -> bool:
            """The other replica, which has met the new store, loads what it never computed."""
            prompt = next(unasked)
            time.sleep(ATTACH_S)
            other = app.post(prompt, replica=1)
            assert text_of(other) == texts[prompt]
            return cached(other) >= blocks * BLOCK_TOKENS

        eventually(loaded)
    finally:
        stores.restart(shipped)


def test_replicas_that_are_replaced_fail_no_request(app: App, cluster: Cluster) -> None:
    load, before = Load(app), set(app.replica_pids())
    changed = cluster.build(api={"request_timeout_s": WAIT_S - 2})
    assert run_while(load, lambda: cluster.deploy("main", changed)) == []
    eventually(lambda: len(app.replica_pids()) == 2 and not before & set(app.replica_pids()))
    assert load.run() == []
