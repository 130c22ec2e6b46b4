"""One streamed completion over HTTP, timed: what the serving benchmarks ask."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `predicted` is how many tokens the router expected to be cached."""

    ok: bool
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached: int = 0
    predicted: int = 0
    text: str = ""


def ask(http: httpx.Client, url: str, prompt: list[int], tokens: int) -> Answer:
    """Greedy completion of token ids; a failure of any kind is an answer that is not ok."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-mooncake-explain": "1"}
    begun = time.perf_counter()
    first_s, text, usage = 0.0, "", {}
    try:
        with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                return Answer(ok=False)
            route = json.loads(response.headers["x-mooncake-route"])
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return Answer(ok=False)
                first_s = first_s or time.perf_counter() - begun
                usage = chunk.get("usage") or usage
                text += "".join(choice["text"] for choice in chunk["choices"])
    except httpx.HTTPError:
        return Answer(ok=False)
    return Answer(
        ok=True,
        ttft_s=first_s,
        prompt_tokens=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        predicted=route["matched_tokens"],
        text=text,
    )
