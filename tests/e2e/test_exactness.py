"""P2 over HTTP, on the default model in bf16: the same tokens with the store off, on and cold, on
and warm on the same replica and on the other, alone and in company, whatever Ray gives a replica.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray import serve

from tests.e2e.cluster import App, Cluster
from tests.waiting import WAIT_S, eventually

BLOCK = 64
NEW_TOKENS = 12
MODEL = "smollm2-135m"
VOCABULARY = 40_000


def random_prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(100, VOCABULARY) for _ in range(length)]


def answer(app: App, prompt: list[int], replica: int | None = None) -> tuple[list[str], int]:
    """Generated tokens, and how many prompt tokens came from a cache."""
    headers = {} if replica is None else {"x-mooncake-replica": str(replica)}
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    url = f"{app.url}/v1/completions"
    response = httpx.post(url, json=body, headers=headers, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    payload = response.json()
    cached = payload["usage"]["prompt_tokens_details"]["cached_tokens"]
    return payload["choices"][0]["logprobs"]["tokens"], cached


def deploy(cluster: Cluster, name: str, backend: str, **sections: dict[str, Any]) -> App:
    engine = {"backend": backend, "block_tokens": BLOCK, "pool": "64MiB", "max_context": 2048}
    model = {"id": MODEL, "name": MODEL}
    application = cluster.build(model=model, engine=engine, **sections)
    return cluster.deploy(name, application)


def in_company(app: App, prompts: list[list[int]], others: int, seed: int) -> list[list[str]]:
    """The prompts' tokens while `others` prompts of all lengths run beside them."""
    chance = random.Random(seed)
    crowd = [random_prompt(chance, chance.randrange(1, 5 * BLOCK)) for _ in range(others)]
    mixed = [*prompts, *crowd]
    order = list(range(len(mixed)))
    chance.shuffle(order)
    with ThreadPoolExecutor(len(mixed)) as pool:
        jobs = {index: pool.submit(answer, app, mixed[index]) for index in order}
        return [jobs[index].result(WAIT_S)[0] for index in range(len(prompts))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "num_cpus"), [("native", 1), ("torch", 0), ("torch", 1), ("torch", 2)]
)
def test_the_same_tokens_whatever_was_cached(
    cluster: Cluster, app: App, backend: str, num_cpus: float
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    lengths = (BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 333)
    prompts = [random_prompt(chance, length) for length in lengths]
    name = f"exact-{backend}-{num_cpus}"
    replicas = {"num_cpus": num_cpus}
    try:
        off = deploy(cluster, name, backend, replicas=replicas, store={"enabled": False})
        want = [answer(off, prompt, replica=0)[0] for prompt in prompts]
        assert [answer(off, prompt, replica=1)[0] for prompt in prompts] == want
        serve.delete(name)
        on = deploy(cluster, name, backend, replicas=replicas)
        assert [answer(on, prompt, replica=0) for prompt in prompts] == [(w, 0) for w in want]
        eventually(lambda: answer(on, prompts[-1], replica=1)[1] == 5 * BLOCK)
        for replica in (0, 1):
            warm = [answer(on, prompt, replica) for prompt in prompts]
            assert [tokens for tokens, _ in warm] == want
            assert [cached for _, cached in warm] == [
                (length - 1) // BLOCK * BLOCK for length in lengths
            ]
        for others in (8, 40):
            assert in_company(on, prompts, others, seed + others) == want
    finally:
        serve.delete(name)
