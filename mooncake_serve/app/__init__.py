"""The Ray Serve application: `import_path: mooncake_serve.app:build` in `deployments/*.yaml`.

An ingress (HTTP, tokenising, planning) in front of model replicas. The configuration is checked
before anything is deployed, so that a mistake is an error at start and not a replica that restarts
for ever.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from mooncake_serve.app.ingress import Ingress
from mooncake_serve.app.terminal import end_serve_run
from mooncake_serve.app.validate import validate
from mooncake_serve.config import AppConfig, load_app_config
from mooncake_serve.errors import MooncakeError
from mooncake_serve.replica import ModelReplica
from mooncake_serve.router.request_router import PlannedRouter

INGRESS_ONGOING_MAX = 1024
INGRESS_CPUS = 0.01
"""Next to nothing, but more than the head of a cluster offers, which should run no store."""
HEALTH_PERIOD_S = 5
HEALTH_TIMEOUT_S = 30


def build(args: dict[str, Any]) -> serve.Application:
    """The application described by `args` (see `AppConfig`). Raises ConfigError or ModelError."""
    try:
        config = load_app_config(args)
        validate(config, weights=True, machine=_one_machine())
    except MooncakeError as err:
        end_serve_run(err)
        raise
    return assemble(config, ModelReplica)


def assemble(config: AppConfig, replica: type) -> serve.Application:
    """Ingress and replicas of a checked configuration; `replica` has ModelReplica's methods."""
    settings = config.model_dump(mode="json")
    model = _model_deployment(config, replica).bind(settings)
    return _ingress_deployment().bind(settings, model)


def _one_machine() -> bool:
    """False on a cluster: the node that builds may be smaller than those that serve."""
    return not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1


def _model_deployment(config: AppConfig, replica: type = ModelReplica) -> Any:
    replicas = config.replicas
    # Ray's own annotations hide what these arguments may be.
    router: Any = PlannedRouter
    per_node: Any = replicas.max_per_node
    return serve.deployment(
        name="model",
        num_replicas=replicas.count,
        max_replicas_per_node=per_node,
        max_ongoing_requests=replicas.max_ongoing_requests,
        request_router_config=RequestRouterConfig(request_router_class=router),
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
    )(replica)


def _ingress_deployment() -> Any:
    return serve.deployment(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=INGRESS_ONGOING_MAX,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(Ingress)


__all__ = ["AppConfig", "build"]
