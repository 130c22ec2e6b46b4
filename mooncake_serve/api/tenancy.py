"""Whose request it is. Without `api.tenant_secret` everybody shares one cache; with it, every API
key is a tenant of its own, and keys root its blocks in a salt that nobody can compute without the
secret, so that no tenant ever hits another's blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fastapi import Request

from mooncake_serve.errors import Unauthorized


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name for accounting and the salt at the root of the block keys."""

    name: str = ""
    salt: bytes = b""


def tenant_of(request: Request, secret: str | None) -> Tenant:
    """The caller's tenant. Raises Unauthorized when tenants are on and the request has no key."""
    if secret is None:
        return Tenant()
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized(
            "this server separates tenants: send your key as `Authorization: Bearer <key>`",
            code="missing_api_key",
        )
    from mooncake_serve.store import tenant_salt

    name = hashlib.sha256(key.strip().encode()).hexdigest()[:16]
    return Tenant(name, tenant_salt(secret.encode(), name))
