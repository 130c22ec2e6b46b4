"""The benchmark's JSON has the promised keys, and loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MOONCAKE = {"mooncake_gb_s", "mooncake_tcp_gb_s"}


@pytest.mark.slow
def test_quick_benchmark_prints_one_object_with_every_key() -> None:
    command = [sys.executable, "-m", "mooncake_serve.bench.store", "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    result = json.loads(done.stdout)
    assert {"machine", "version", "runs", "memcpy_gb_s", "unix_rtt_us_p50"} <= result.keys()
    assert {"lease_batch32_us_p50", "match_512_keys_us_p50", "scale"} <= result.keys()
    for name, keys in {
        "lease": {"bytes", "ours_us_p50", "ours_us_p99", "ray_get_us_p50"},
        "read_into": {"bytes", "codec", "ours_gb_s", "ray_get_copy_gb_s", *MOONCAKE},
        "put": {"bytes", "ours_gb_s", "ray_put_gb_s", *MOONCAKE},
    }.items():
        plain = [row for row in result[name] if row.get("codec", "none") == "none"]
        assert plain
        assert all(row.keys() == keys for row in plain)
        for key in keys & MOONCAKE:
            assert all(row[key] for row in plain) or key in result["why"]
    for name in ("nvme_read", "peer_fetch"):
        assert result[name] is not None or name in result["why"]
    assert result["pressure"]["lost_silently"] == 0
    assert result["scale"]["index_bytes_per_own_block"] <= 128
