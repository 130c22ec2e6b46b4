"""What the processes of one node may take of its memory, together.

In a container every page counts against one limit: the store's arena (a memfd), replicas with
their weights, Ray's object store in /dev/shm. Over the limit the kernel kills; so the sum is
refused before anything is reserved.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_serve.config import GIB, AppConfig
from mooncake_serve.errors import ConfigError
from mooncake_serve.models import resolve_model, weight_bytes

REPLICA_OVERHEAD = GIB // 2
"""A replica's process without weights and KV: Python, torch, Ray."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes by who takes them; `store` covers arena, put buffers and indexes."""

    store: int
    replicas: int
    replica: int
    """Of each; `weights` are part of it."""
    weights: int = 0
    objects: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.store + self.replicas * self.replica + self.objects

    def check(self, limit: int) -> None:
        """Raise ConfigError when `limit` does not hold the sum, naming its parts."""
        if self.store > limit:
            raise ConfigError(
                "store.dram",
                f"{_gib(self.store)} is more than the {_gib(limit)} this machine allows",
            )
        if self.total > limit:
            weights = f" ({_gib(self.weights)} of it weights)" if self.weights else ""
            objects = f" and Ray's object store ({_gib(self.objects)})" if self.objects else ""
            raise ConfigError(
                "engine.pool",
                f"the store ({_gib(self.store)}), {self.replicas} replicas of "
                f"{_gib(self.replica)}{weights}{objects} need {_gib(self.total)}, this machine "
                f"allows {_gib(limit)}; lower engine.pool, store.dram or replicas.count, or raise "
                "the container's memory",
            )


def node_budget(config: AppConfig, replicas: int, weights: int, objects: int = 0) -> Budget:
    """The budget of a node with so many replicas, each with so many bytes of weights in host
    memory (see `host_weights`), and so large an object store."""
    return Budget(
        store=_store(config),
        replicas=replicas,
        replica=REPLICA_OVERHEAD + weights + (config.engine.pool if on_cpu(config) else 0),
        weights=weights,
        objects=objects,
    )


def host_weights(config: AppConfig) -> int:
    """Bytes of weights that each replica keeps in host memory; 0 until they have been fetched.

    Raises ModelNotFound or ModelError.
    """
    if not on_cpu(config):
        return 0
    return weight_bytes(resolve_model(config.model, weights=False), config.model.dtype)


def _store(config: AppConfig) -> int:
    """The store's cap; the cluster's index is within it."""
    return config.store.dram if config.store.enabled else 0


def replicas_at_most(config: AppConfig, cpus: float, gpus: float) -> int:
    """How many replicas Ray may place on a node that offers so much."""
    most = config.replicas.most_per_node
    for asked, offered in ((config.replicas.num_cpus, cpus), (config.replicas.num_gpus, gpus)):
        if asked:
            most = min(most, int(offered / asked))
    return most


def on_cpu(config: AppConfig) -> bool:
    """Whether the pool is host memory."""
    return not config.engine.device.startswith("cuda") and config.replicas.num_gpus == 0


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}GiB"
