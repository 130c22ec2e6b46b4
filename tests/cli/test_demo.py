"""The demonstration's own judgement: what it reports, and what it does not let pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake_serve import demo
from mooncake_serve.client import Completion, TokenLogprob, TokenUsage
from mooncake_serve.config import AppConfig
from mooncake_serve.demo import DemoError
from mooncake_serve.models import load_tokenizer

STORE = {"logical_bytes": 10, "physical_bytes": 10, "blocks": 1}
DOCUMENTED = {
    "prompt_tokens",
    "cold_ttft_s",
    "warm_ttft_same_replica_s",
    "warm_ttft_other_replica_s",
    "cached_tokens_other_replica",
    "outputs_identical",
    "store",
}


def answer(replica: str, logprob: float = -0.5, cached: int = 6144) -> Completion:
    return Completion(
        text="yes",
        finish_reason="length",
        usage=TokenUsage(6200, 1, cached),
        model="m",
        request_id="r",
        ttft_s=1.0,
        replica=replica,
        logprobs=(TokenLogprob("yes", logprob),),
    )


def result(cold: Completion, same: Completion, other: Completion) -> dict[str, Any]:
    answers = {"cold": cold, "warm, same replica": same, "warm, other replica": other}
    return demo.report(answers, STORE)


def test_what_should_be_shown_passes() -> None:
    good = result(answer("a", cached=0), answer("a"), answer("b"))
    assert good.keys() >= DOCUMENTED
    assert good["cached_tokens_other_replica"] == 6144
    demo.check(good)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (answer("a"), "replicas.count"),
        (answer("b", logprob=-0.5000001), "differ"),
        (answer("b", cached=0), "store"),
    ],
)
def test_what_should_not_be_is_an_error(other: Completion, reason: str) -> None:
    with pytest.raises(DemoError, match=reason):
        demo.check(result(answer("a", cached=0), answer("a"), other))


def test_the_document_is_long_new_and_fits_the_model() -> None:
    config = AppConfig()
    first, second = demo.document(config), demo.document(config)
    assert first != second
    tokens = load_tokenizer(config.model).encode(first)
    assert demo.PROMPT_TOKENS_MIN < len(tokens) < 8192 - 200


@pytest.mark.parametrize(
    ("change", "said"),
    [(("count: 2", "count: two"), "replicas.count"), (("port: 8000", "port: 99999"), "port")],
)
def test_a_bad_configuration_ends_it_before_anything_starts(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    text = demo.CONFIG.read_text("utf-8")
    assert change[0] in text
    config = tmp_path / "app.yaml"
    config.write_text(text.replace(*change))
    command = [sys.executable, "-m", "mooncake_serve.demo", "--exit", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
