"""Blocks between stores over Mooncake's transfer engine: RDMA where there is some, TCP anywhere.

The store copies what a peer asked for into registered memory, and the peer's engine reads it
there; everything else goes over the peers' TCP connection as without an engine. The memory that
blocks are kept in is never registered. The engine itself asks nobody who he is, and listens on
ports of its own: only stores may reach them.

Needs the package `mooncake-transfer-engine` or, without CUDA, `mooncake-transfer-engine-non-cuda`.
"""

from __future__ import annotations

import os
from typing import Any

from mooncake_serve.errors import ConfigError, StoreUnavailable

FIELD = "store.peer.transfer_engine"
PATIENCE_S = "5"
"""When the engine gives up on a read; the least it accepts."""


class TransferEngine:
    """The engine of one process, for `PeerSettings(engine=…)`.

    `host` is the address at which the engines of other nodes reach this one. `protocol` is `tcp`,
    `rdma` or another that the installed package knows; `device` names the network cards to use,
    with commas, empty for all. Raises ConfigError where the engine is not installed or does not
    start.
    """

    def __init__(self, host: str, *, protocol: str = "tcp", device: str = "") -> None:
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", PATIENCE_S)
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        if protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "true")
        self._engine = _engine()
        if self._engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, device):
            raise ConfigError(
                FIELD, f"the engine did not start with {protocol!r} on {host}; its log says why"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, length: int) -> None:
        """Let other engines read `length` bytes at `address`."""
        if self._engine.register_memory(address, length):
            raise StoreUnavailable(f"the transfer engine refused to register {length} bytes")

    def read(self, session: str, source: int, target: int, length: int, patience_s: float) -> None:
        """Fill `length` bytes at `target` here with those at `source` of the engine `session`.

        The engine's own limit bounds it where `patience_s` is shorter.
        """
        if self._engine.transfer_sync_read(session, target, source, length):
            raise TimeoutError(f"the engine at {session} did not deliver {length} bytes")


def _engine() -> Any:
    try:
        from mooncake.engine import (  # pyright: ignore[reportMissingImports]
            TransferEngine as Engine,
        )
    except ImportError as error:
        raise ConfigError(
            FIELD, f"no transfer engine here ({error}); pip install mooncake-transfer-engine"
        ) from error
    return Engine()
