"""The SDK: `Client` and `AsyncClient` for a running mooncake_serve application.

Importing it brings in neither torch nor ray.
"""

from mooncake_serve.client._async import AsyncClient, AsyncStream
from mooncake_serve.client._sync import Client, Stream
from mooncake_serve.client.batch import (
    BatchReport,
    Document,
    Job,
    JobResult,
    Progress,
    document_jobs,
    read_documents,
    read_jobs,
)
from mooncake_serve.client.types import Chunk, Completion, TokenLogprob, Tokens, TokenUsage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatchReport",
    "Chunk",
    "Client",
    "Completion",
    "Document",
    "Job",
    "JobResult",
    "Progress",
    "Stream",
    "TokenLogprob",
    "TokenUsage",
    "Tokens",
    "document_jobs",
    "read_documents",
    "read_jobs",
]
