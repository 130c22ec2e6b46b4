"""How much of the directory one tenant may take, so that there is room for the others.

What a batch writes counts too, but is never refused: a batch that was taken can always end. Each
refusal names the setting that is its reason. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import InvalidRequest, RateLimited

BATCHES_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Of each tenant: files, their bytes, and batches that have not ended."""

    files: int
    bytes: int
    batches: int

    @classmethod
    def of(cls, settings: ApiConfig) -> Self:
        """What the settings allow."""
        return cls(settings.tenant_files, settings.tenant_file_bytes, settings.tenant_batches)

    def check_file(self, files: int, size: int, new: int) -> None:
        """`files` of `size` bytes are there and one of `new` bytes comes. Raises InvalidRequest."""
        if files >= self.files:
            raise InvalidRequest(
                f"you have {files} files and may have {self.files}: delete some, or raise "
                "api.tenant_files",
                param="file",
                code="too_many_files",
            )
        if size + new > self.bytes:
            raise InvalidRequest(
                f"your files would have {size + new} bytes and may have {self.bytes}: delete some, "
                "or raise api.tenant_file_bytes",
                param="file",
                code="storage_exceeded",
            )

    def check_batch(self, unfinished: int) -> None:
        """So many have not ended and one more comes. Raises RateLimited."""
        if unfinished >= self.batches:
            raise RateLimited(
                f"{unfinished} batches of yours have not ended, and {self.batches} may be open: "
                "wait for one, cancel one, or raise api.tenant_batches",
                retry_after_s=BATCHES_RETRY_S,
            )
