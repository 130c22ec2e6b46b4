"""The engine's thread count is its own: Ray's OMP_NUM_THREADS changes no bit of KV."""

import json
import os
import subprocess
import sys
from typing import Any

SCRIPT = """
import hashlib, json
from tests.engine.support import DictStore, generate, model_engine, random_prompt, tiny_model

store = DictStore()
loaded = tiny_model("llama", hidden_size=256, intermediate_size=640, head_dim=64)
with model_engine(loaded, store, block_tokens=128, threads=2) as engine:
    tokens = generate(engine, [random_prompt(300, 1)], 6)
    assert engine.flush()
    name = engine.info.namespace
digest = hashlib.sha256(b"".join(key + store.blocks[key] for key in sorted(store.blocks)))
print(json.dumps([tokens, digest.hexdigest(), len(store.blocks), name]))
"""


def run(omp_threads: str) -> list[Any]:
    """What a replica that was given this many CPUs computes."""
    environment = {**os.environ, "OMP_NUM_THREADS": omp_threads}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_bits_whatever_ray_sets() -> None:
    one, many = run("1"), run("4")
    assert one == many
    assert one[2] == 2
    assert "threads2" in one[3]
