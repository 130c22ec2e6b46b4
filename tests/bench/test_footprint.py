"""The footprint benchmark measures a store or fails: an engine without one is no arm."""

from __future__ import annotations

import os
import signal

import pytest

from mooncake_serve.bench import footprint
from mooncake_serve.bench.footprint import MIB, attached_store
from mooncake_serve.errors import StoreUnavailable
from mooncake_serve.store import BlockShape, block_keys


def put_one(store: footprint.NodeStore) -> list[str]:
    return store.put(block_keys("n", b"", range(1), 1), [None], [bytes(64)], BlockShape.opaque(64))


def test_a_store_that_was_there_throughout_passes() -> None:
    with attached_store(64 * MIB, {"codec": "fast"}) as (client, store):
        assert put_one(store) == ["stored"]
        assert client.stats()["blocks"] == 1


def kill_during_measurement() -> None:
    with attached_store(64 * MIB, {}) as (_, store):
        pid = store.server_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert put_one(store) != ["stored"]


def test_a_store_that_dies_fails_the_run() -> None:
    with pytest.raises(StoreUnavailable, match="was away"):
        kill_during_measurement()


def test_a_store_that_never_comes_up_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_: footprint.Measurement) -> None:
        with attached_store(1 << 60, {}):
            pass

    monkeypatch.setattr(footprint.Measurement, "run", run)
    assert footprint.main(["--json"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "bench footprint: the store did not start" in err
