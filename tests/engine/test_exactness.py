"""P2 on the CPU, in bf16: random models of each family, and the embedded default."""

import pytest

from mooncake_serve.config import ModelConfig
from mooncake_serve.models import LoadedModel, load_model
from tests.engine.exactness import check_preemption, check_second_turn, check_store_and_company
from tests.engine.support import FAMILIES, generate, model_engine, random_prompt, tiny_model


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model(ModelConfig(), "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_with_store_and_company(family: str) -> None:
    check_store_and_company(tiny_model(family), block_tokens=32, company=8)


def test_tiny_model_among_forty() -> None:
    check_store_and_company(tiny_model("llama"), block_tokens=32, company=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_second_turn(family: str) -> None:
    check_second_turn(tiny_model(family), block_tokens=32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiny_models_preempted_in_mid_decode(family: str) -> None:
    check_preemption(tiny_model(family), block_tokens=32)


def test_two_threads() -> None:
    check_second_turn(tiny_model("llama"), block_tokens=32, threads=2)


def test_default_model_with_store_and_company(smollm2: LoadedModel) -> None:
    check_store_and_company(smollm2, block_tokens=32, company=3, max_tokens=3, company_tokens=20)


def test_native_backend_with_store_and_company(smollm2: LoadedModel) -> None:
    check_store_and_company(
        smollm2, block_tokens=32, company=8, max_tokens=4, company_tokens=20, backend="native"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_native_backend_second_turn_and_preemption(smollm2: LoadedModel) -> None:
    check_second_turn(smollm2, block_tokens=32, backend="native")
    check_preemption(smollm2, block_tokens=32, requests=4, backend="native")


def test_plain_torch_with_store_and_company() -> None:
    """Attention by torch alone, as on machines without the kernels' instructions."""
    check_store_and_company(tiny_model("llama"), block_tokens=32, company=8, backend="plain torch")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.timeout(1800)
def test_default_model_second_turn_and_preemption(smollm2: LoadedModel, threads: int) -> None:
    check_second_turn(smollm2, block_tokens=64, threads=threads)
    check_preemption(smollm2, block_tokens=32, requests=4, threads=threads)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("company", [8, 40])
@pytest.mark.timeout(1800)
def test_default_model_at_its_default_block(
    smollm2: LoadedModel, company: int, threads: int
) -> None:
    check_store_and_company(
        smollm2, block_tokens=256, company=company, threads=threads, company_tokens=300
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_and_torch_attention_agree(family: str) -> None:
    """The native kernel against torch: same tokens in fp32, where rounding decides nothing."""
    import torch

    loaded = tiny_model(family, dtype=torch.float32)
    prompts = [random_prompt(20 + 11 * n, n) for n in range(6)]
    answers = []
    for backend in ("torch", "plain torch"):
        with model_engine(loaded, backend=backend) as engine:
            answers.append(generate(engine, prompts, 24))
    assert answers[0] == answers[1]
