"""Several Ray nodes on this machine, each with its own store. Each test runs a Ray of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import BLOCK_TOKENS, save_tiny_model

pytestmark = pytest.mark.slow
CHAOS_S = float(os.environ.get("CHAOS_S", "60"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(*command: str | Path, timeout_s: float) -> dict[str, Any]:
    # A Ray of its own: not the one this session may have.
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_three_arms_agree_and_the_other_node_is_used(model: Path) -> None:
    options = ["--tiny", "--model", str(model), "--block-tokens", str(BLOCK_TOKENS)]
    result = run("mooncake_serve.bench.cluster", *options, timeout_s=540)
    assert result["failed"] == 0
    assert result["outputs_identical"]
    for row in result["workloads"]:
        assert row["ours"]["cached_share"] >= row["no_store"]["cached_share"]
        assert row["serve_default"]["fetched_blocks"] > 0, "blocks crossed between the nodes"
    assert result["predicted_equals_actual_share"] >= 0.9


def test_chaos(model: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    result = run("tests.e2e.chaos", model, str(CHAOS_S), str(seed), timeout_s=CHAOS_S + 400)
    assert result["killed"]["node"] == 1
    assert min(result["killed"].values()) > 0, "nothing was killed"
    assert result["answered"] > 20
    assert (result["wrong"], result["failures"]) == (0, [])
