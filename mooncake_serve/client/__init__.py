"""The SDK: `Client` and `AsyncClient` for a running mooncake_serve application.

Importing it brings in neither torch nor ray.
"""

from mooncake_serve.client._async import AsyncClient, AsyncStream
from mooncake_serve.client._sync import Client, Stream
from mooncake_serve.client.types import Chunk, Completion, TokenLogprob, TokenUsage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "Stream",
    "TokenLogprob",
    "TokenUsage",
]
