"""Batches of long-context jobs, run by the client: see `Client.batch`."""

from mooncake_serve.client.batch.jobs import (
    Document,
    Job,
    document_jobs,
    read_documents,
    read_jobs,
    split,
)
from mooncake_serve.client.batch.report import BatchReport, JobResult, Progress

__all__ = [
    "BatchReport",
    "Document",
    "Job",
    "JobResult",
    "Progress",
    "document_jobs",
    "read_documents",
    "read_jobs",
    "split",
]
