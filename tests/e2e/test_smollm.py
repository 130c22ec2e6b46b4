"""The embedded model behind the whole server: tools and schemas that a random one cannot show."""

from __future__ import annotations

import pytest

from tests.conformance.check import CHECKS
from tests.e2e.cluster import App, Cluster

NAME = "smollm2-135m"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm(cluster: Cluster, deployed: App) -> App:
    del deployed  # The application under "/" answers for prefixes that are not there yet.
    model = {"id": NAME, "name": NAME}
    engine = {"block_tokens": None, "pool": "256MiB"}
    return cluster.deploy("smollm", cluster.build(model=model, engine=engine))


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(smollm: App, check: object) -> None:
    assert callable(check)
    with smollm.client() as client:
        check(client, NAME)
