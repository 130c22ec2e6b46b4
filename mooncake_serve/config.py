"""The application's configuration: one frozen tree, validated, unknown keys rejected.

`AppConfig` is what `args:` in `deployments/*.yaml` holds. Sizes are written as "4GiB". Every
error names the dotted field and what to write instead; `load_app_config` turns pydantic's report
into a `ConfigError`.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mooncake_serve.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

Size = Annotated[ByteSize, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """Which model, and under which name clients ask for it."""

    id: str = "smollm2-135m"
    """The embedded default, a Hugging Face id, a local folder, or a `.gguf` file."""
    name: str | None = None
    """The name in `/v1/models`; defaults to `id`."""
    revision: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @property
    def served_name(self) -> str:
        """The name clients use."""
        return self.name or self.id


class EngineConfig(Section):
    """How one replica computes."""

    backend: Literal["auto", "torch", "native"] = "auto"
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:1"."""
    threads: int = Field(default=1, ge=1, le=256)
    isa: Literal["avx2", "avx512", "avx512_bf16", "amx"] | None = None
    """Instruction set of the native backend; None takes the machine's best. Replicas on different
    CPUs share KV if all are held to one that each of them has."""
    block_tokens: int | None = Field(default=None, ge=16, le=1024)
    """Tokens of a KV block; None is 256."""
    pool: Size = ByteSize(GIB)
    """Memory for KV blocks of running requests, and the prefixes kept from ended ones."""
    max_batch: int = Field(default=32, ge=1, le=1024)
    max_context: int | None = Field(default=None, ge=16)
    """Cap below the model's own context; None takes the model's."""
    exactness: Literal["canonical", "relaxed"] = "canonical"
    """relaxed also publishes blocks that decode wrote, under a numerics id of its own."""

    @field_validator("block_tokens")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("must be a power of two, such as 256 or 512")
        return value


class PeerTls(Section):
    """Mutual TLS between stores: PEM files, on every node at the same paths."""

    ca: str
    """The authority that signs every store's certificate."""
    certificate: str
    key: str
    name: str = "mooncake-peer"
    """The name that every store's certificate carries."""


class PeerEngine(Section):
    """Mooncake's transfer engine for the blocks that stores fetch from each other."""

    protocol: str = "rdma"
    """rdma, tcp or another that the installed package knows."""
    device: str = ""
    """Network cards, with commas; empty takes all that the engine finds."""


class PeerConfig(Section):
    """How the stores of the cluster's nodes meet. Without `listen` each serves its node alone."""

    listen: str | None = None
    """`host:port`; port 0 takes a free one, host 0.0.0.0 all interfaces (then prove yourself)."""
    token_file: str | None = None
    """A file with the secret that all stores share."""
    tls: PeerTls | None = None
    transfer_engine: PeerEngine | None = None
    """On every node or on none; does not go with `tls`, which would not cover the blocks."""
    max_bytes_per_s: Size | None = None
    """Bound on what one store sends to all peers together."""
    index: Size | None = None
    """Most memory of a node's cluster index, part of `store.dram`; 1/32 of it by default, and
    256 MiB at most."""


class NvmeSettings(Section):
    """The store's tier on local disk: what memory has no room for, kept across restarts."""

    path: str
    """A directory of its own on a local file system, one per node; created if absent."""
    bytes: Size
    """Hard cap of what the directory may take on disk."""
    write_bytes_per_s: Annotated[ByteSize, Field(ge=0)] = ByteSize(256 * MIB)
    """Most bytes written a second, which is what wears a disk; 0 is no limit."""
    codec: Literal["none", "fast", "dense", "auto"] | None = None
    """How blocks are stored there; auto, dense where the disk is slower than decoding; None, as
    they are in memory."""


class StoreSettings(Section):
    """The node's store. The first creator's values win; a different value later is an error."""

    enabled: bool = True
    dram: Size = ByteSize(2 * GIB)
    """Hard cap of physical bytes: arena, ingest and index together."""
    ingest: Size = ByteSize(64 * MIB)
    """Put buffer of each client."""
    codec: Literal["none", "fast", "dense", "auto"] = "auto"
    """How blocks are stored in DRAM: as they are; fast, a third smaller and read at memory speed;
    dense, fast on put and smallest once idle; auto, fast where this machine decodes as fast as it
    copies."""
    eviction: Literal["ours", "lru"] = "ours"
    """Which block goes when there is no room: by recency, corrected by how often blocks of its kind
    were used again; or the least recently used."""
    max_sessions: int = Field(default=64, ge=1, le=4096)
    socket_dir: str | None = None
    """Directory of the Unix socket, mode 0700; None picks one under the runtime directory."""
    idle_exit_s: float = Field(default=600.0, ge=0)
    """Exit when no client is attached and no app of ours is deployed for this long; 0 never."""
    peer: PeerConfig = PeerConfig()
    tenant_dram: Size | None = None
    """Most memory of each named tenant; None does not limit it."""
    tenant_nvme: Size | None = None
    """Most disk of each named tenant; None does not limit it."""
    nvme: NvmeSettings | None = None
    """Keep blocks on local disk too; None keeps them in memory only."""

    def server_options(self) -> dict[str, Any]:
        """What `StoreServer` is made with, but for its socket."""
        options: dict[str, Any] = {
            "dram_bytes": int(self.dram),
            "ingest_bytes_max": int(self.ingest),
            "max_sessions": self.max_sessions,
            "codec": self.codec,
            "eviction": self.eviction,
        }
        if self.tenant_dram:
            options["tenant_bytes"] = int(self.tenant_dram)
        if self.tenant_nvme:
            options["tenant_nvme_bytes"] = int(self.tenant_nvme)
        if self.nvme:
            options["nvme_path"] = self.nvme.path
            options["nvme_bytes"] = int(self.nvme.bytes)
            options["nvme_write_bytes_per_s"] = int(self.nvme.write_bytes_per_s)
            options["nvme_codec"] = self.nvme.codec
        return options


class ReplicaConfig(Section):
    """How many model replicas, and what each asks of Ray."""

    count: int = Field(default=2, ge=1, le=4096)
    max_per_node: int | None = Field(default=None, ge=1, le=100)
    """Most replicas on one Ray node, which its memory must hold; None leaves it to Ray, and then
    memory must hold `count`. Set it where Serve scales by itself."""
    num_cpus: float = Field(default=0.5, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    max_ongoing_requests: int = Field(default=64, ge=1)

    @property
    def most_per_node(self) -> int:
        """How many a node's memory must hold if Ray has room for them."""
        return self.max_per_node or self.count


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ApiConfig(Section):
    """Limits of the HTTP front."""

    max_body: Size = ByteSize(16 * MIB)
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_queued_tokens: int = Field(default=2_000_000, ge=1)
    """Prompt tokens that may wait over all replicas before new requests get 429."""
    ttft_slo_s: float | None = Field(default=None, gt=0)
    """Requests that would wait longer than this for their first token get 429 at once."""
    tenant_secret_file: str | None = None
    """A file with the cluster secret from which tenant salts derive; 16 bytes or more."""
    keys_file: str | None = None
    """API keys, hashed (`mooncake-serve keys`); None lets everybody in."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Of one tenant; None sets no limit. A key may have another."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests of one tenant at once; None sets no limit. A key may have another."""
    state_dir: str | None = "~/.local/state/mooncake_serve"
    """Where files and batches are kept, one folder for each application; None offers neither."""
    max_file: Size = ByteSize(200 * MIB)
    tenant_files: int = Field(default=1000, ge=1)
    """Files of one tenant, with what its batches wrote; more are refused until it deletes some."""
    tenant_file_bytes: Size = ByteSize(10 * GIB)
    """Bytes of one tenant's files."""
    tenant_batches: int = Field(default=100, ge=1)
    """Batches of one tenant that have not ended."""
    batch_concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests of batches that run at once."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the operators' routes; None has none."""
    admin_token_file: str | None = None
    """A file with the token that the operators' port asks for; None asks for none."""

    @model_validator(mode="after")
    def _keys_need_a_secret(self) -> ApiConfig:
        if self.keys_file is not None and self.tenant_secret_file is None:
            raise ValueError("keys_file needs tenant_secret_file, which keeps tenants' KV apart")
        return self

    @model_validator(mode="after")
    def _open_port_needs_a_token(self) -> ApiConfig:
        if self.admin_token_file is None and not _is_loopback(self.admin_host):
            raise ValueError("admin_host beyond loopback needs admin_token_file")
        return self


class ObserveConfig(Section):
    """Logs and traces; metrics are always on."""

    logs: Literal["text", "json"] = "text"
    """How lines look on stderr; those about a request name it."""
    traces: str | None = None
    """URL of an OTLP/HTTP collector, such as http://localhost:4318/v1/traces; None is off."""


class AppConfig(Section):
    """`args:` of the application."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    store: StoreSettings = StoreSettings()
    replicas: ReplicaConfig = ReplicaConfig()
    api: ApiConfig = ApiConfig()
    observe: ObserveConfig = ObserveConfig()


def load_app_config(args: dict[str, Any]) -> AppConfig:
    """Validate the `args:` mapping. Raises ConfigError naming the first wrong field."""
    try:
        return AppConfig.model_validate(args)
    except ValidationError as err:
        raise config_error(err) from err


def config_error(err: ValidationError) -> ConfigError:
    """One line a person can act on, from pydantic's report."""
    first = err.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(_known_fields(first["loc"][:-1])))
        return ConfigError(field, f"unknown setting; known here: {known}")
    value = first.get("input")
    return ConfigError(field, f"{first['msg']} (got {value!r})")


def _known_fields(path: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = AppConfig
    for part in path:
        annotation = section.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return list(section.model_fields)
