"""`mooncake-serve store restart` on a running cluster: new settings, same application."""

from __future__ import annotations

import uuid

from mooncake_serve.app import stores
from mooncake_serve.config import StoreSettings
from tests.e2e.cluster import App, Cluster
from tests.waiting import eventually

MIB = 1 << 20


def test_restart_applies_settings_and_the_application_stays(app: App, cluster: Cluster) -> None:
    stores.connect()
    shipped = StoreSettings.model_validate(cluster.args()["store"])
    before = app.store_pid()
    answer = app.post("A store may go and come back. " * 8).json()["choices"][0]["text"]
    try:
        bigger = shipped.model_copy(update={"dram": shipped.dram + 32 * MIB})
        assert len(stores.restart(bigger)) == 1
        assert app.store_stats()["dram_bytes"] == bigger.dram
    finally:
        assert len(stores.restart(shipped)) == 1
    assert app.store_stats()["dram_bytes"] == shipped.dram
    assert app.store_pid() != before
    again = app.post("A store may go and come back. " * 8)
    assert again.json()["choices"][0]["text"] == answer
    # Replicas attach by themselves: blocks computed from then on are in the new store.
    eventually(lambda: app.post(f"{uuid.uuid4()} again. " * 16) and app.store_stats()["blocks"])
