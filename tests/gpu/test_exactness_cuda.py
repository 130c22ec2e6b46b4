"""The engine's exactness scenarios on CUDA: `make test-gpu`. What passes here may be claimed."""

import pytest
import torch

from mooncake_serve.config import ModelConfig
from mooncake_serve.models import LoadedModel, load_model
from tests.engine.exactness import check_preemption, check_second_turn, check_store_and_company
from tests.engine.support import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(ModelConfig(), "cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str) -> None:
    loaded = tiny_model(family, device="cuda")
    check_store_and_company(loaded, block_tokens=32, company=8)
    check_second_turn(loaded, block_tokens=32)
    check_preemption(loaded, block_tokens=32)


@pytest.mark.parametrize("company", [8, 40])
def test_default_model_with_store_and_company(smollm2: LoadedModel, company: int) -> None:
    check_store_and_company(smollm2, block_tokens=256, company=company, company_tokens=300)


def test_default_model_second_turn(smollm2: LoadedModel) -> None:
    check_second_turn(smollm2, block_tokens=256)


def test_default_model_preempted_in_mid_decode(smollm2: LoadedModel) -> None:
    check_preemption(smollm2, block_tokens=64)
