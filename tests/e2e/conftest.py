from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import App, Cluster, save_tiny_model
from tests.waiting import eventually


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(save_tiny_model(tmp_path_factory.mktemp("tiny")))
    yield started
    started.close()


@pytest.fixture(scope="session")
def deployed(cluster: Cluster) -> App:
    return cluster.deploy("main", cluster.build())


@pytest.fixture
def app(deployed: App) -> App:
    """The application, whole again after whatever the last test did to it."""
    eventually(lambda: len(deployed.replica_pids()) == 2 and deployed.store_pid())
    eventually(lambda: deployed.post("ready?").status_code == 200)
    return deployed
