"""One Ray with Serve for the whole session, and applications of a tiny random model on it.

Everything listens on loopback and free ports. Ray's processes end with the session.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import ray
from ray import serve

from mooncake_serve.config import StoreSettings, load_app_config
from mooncake_serve.store import StoreClient
from mooncake_serve.store.location import socket_path
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
BLOCK_TOKENS = 32
CONTEXT = 8192
MODEL = "tiny"
INGRESS_PORTS = range(30000, 31000)
"""Where Serve's ingress replicas listen when HAProxy is in front of them."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_tiny_model(folder: Path) -> Path:
    """A random Llama and a tokenizer of one token per byte, as a local folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from tests.engine.support import tiny_config

    torch.manual_seed(11)
    config = tiny_config("llama", head_dim=64, max_position_embeddings=CONTEXT)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    vocabulary |= {f"<extra{n}>": n for n in range(len(vocabulary), 320)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
    )
    fast.save_pretrained(folder)
    return folder


def ray_processes() -> list[psutil.Process]:
    """Every process of this session's Ray."""
    return psutil.Process().children(recursive=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@dataclass
class App:
    """A deployed application."""

    name: str
    url: str
    store_socket: str

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client; no retries of its own, so that every failure is seen."""
        options = {"max_retries": 0, "timeout": WAIT_S, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def post(self, prompt: str, **options: Any) -> httpx.Response:
        """One completion; `replica` pins it."""
        replica = options.pop("replica", None)
        headers = {"x-mooncake-explain": "1"}
        if replica is not None:
            headers["x-mooncake-replica"] = str(replica)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)

    def replica_pids(self) -> list[int]:
        """Processes of the model replicas."""
        return self._pids("model")

    def pids(self) -> list[int]:
        """Processes of the ingress and of the model replicas."""
        return self._pids("")

    def ingress_url(self) -> str:
        """The ingress's own port, behind the proxy."""
        pids = self._pids("ingress")
        ports = [
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.pid in pids and connection.laddr.port in INGRESS_PORTS
        ]
        return f"http://127.0.0.1:{ports[0]}"

    def _pids(self, deployment: str) -> list[int]:
        title = f"ray::ServeReplica:{self.name}:{deployment}"
        return [process.pid for process in ray_processes() if _title(process).startswith(title)]

    def store_pid(self) -> int | None:
        """Process of the node's store, if one answers."""
        from mooncake_serve.errors import StoreError

        try:
            with StoreClient.connect(self.store_socket, ingest_bytes=0, timeout_s=1.0) as client:
                return client.server_pid
        except StoreError:
            return None

    def store_stats(self) -> dict[str, Any]:
        """Counters of the node's store."""
        with StoreClient.connect(self.store_socket, ingest_bytes=0, timeout_s=5.0) as client:
            return client.stats()


class Cluster:
    """Ray and Serve, started as `deployments/app.yaml` would have them."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.port = free_port()
        self.stats_port = free_port()
        # Short: a Unix socket's path has 108 bytes.
        self._sockets = tempfile.TemporaryDirectory(prefix="mk-")
        os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        context: Any = ray.init(
            "local",  # Not one that somebody has running on this machine.
            # More than a small machine has: what replicas ask of Ray is a matter of each test.
            num_cpus=8,
            include_dashboard=False,
            namespace="serve",
            log_to_driver=False,
            object_store_memory=128 << 20,
        )
        self.session = Path(context.address_info["session_dir"])
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": self.port},
            controller_options={"runtime_env": {"env_vars": self._proxy_settings()}},
        )

    def _proxy_settings(self) -> dict[str, str]:
        """The environment of `deployments/app.yaml`, with free ports."""
        import yaml

        config = yaml.safe_load((ROOT / "deployments" / "app.yaml").read_text())
        shipped = config["controller_options"]["runtime_env"]["env_vars"]
        # Files of its own, so that another Serve on this machine is not disturbed.
        folder = self._sockets.name
        return {
            **shipped,
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        }

    def args(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """`args:` of an application of the tiny model."""
        base: dict[str, dict[str, Any]] = {
            "model": {"id": str(self.model), "name": MODEL},
            "engine": {
                "backend": "auto",
                "threads": 1,
                "block_tokens": BLOCK_TOKENS,
                "pool": "64MiB",
            },
            "store": {"dram": "256MiB", "ingest": "8MiB", "socket_dir": self._sockets.name},
            "replicas": {"count": 2, "num_cpus": 0.1},
            "api": {"request_timeout_s": WAIT_S, "state_dir": self._sockets.name},
        }
        named = {**base, **sections}
        return {name: {**base.get(name, {}), **sections.get(name, {})} for name in named}

    def deploy(self, name: str, application: serve.Application, *, wait: bool = True) -> App:
        """Run an application under its own prefix."""
        prefix = "/" if name == "main" else f"/{name}"
        serve.api._run(application, name=name, route_prefix=prefix, _blocking=wait)
        settings = StoreSettings(socket_dir=self._sockets.name)
        node_id = ray.get_runtime_context().get_node_id()
        url = f"http://127.0.0.1:{self.port}{prefix}".rstrip("/")
        return App(name, url, str(socket_path(settings, node_id)))

    def build(self, **sections: dict[str, Any]) -> serve.Application:
        """The product's application."""
        from mooncake_serve.app import build

        args = self.args(**sections)
        load_app_config(args)
        return build(args)

    def close(self) -> None:
        """End everything that was started."""
        started = ray_processes()
        ray.shutdown()
        # HAProxy drains for half a minute when asked politely.
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=20)
        self._sockets.cleanup()
