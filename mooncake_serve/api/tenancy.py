"""Whose request it is, decided before any route sees it, and whether it may come in.

Every route needs a key but for those in OPEN_ROUTES, so a new route is closed until somebody opens
it. With `api.keys_file` a tenant is what the key's record says. With `api.tenant_secret_file`
alone, every key is a tenant of its own: for a server behind a gateway that checks keys. With
neither, everybody is one tenant. A tenant's blocks are rooted in a salt that nobody can compute
without the secret, so that no tenant ever hits another's.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_serve.api.keys import Key, KeyRing
from mooncake_serve.api.limits import Limiter, Limits
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import Unauthorized
from mooncake_serve.secret_file import read_secret

OPEN_ROUTES = frozenset({"/health", "/version"})


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name for accounting, the salt at the root of the block keys, and what it may ask."""

    name: str = ""
    salt: bytes = b""
    limits: Limits = field(default_factory=Limits)


class Doorkeeper:
    """Names tenants and counts what they ask."""

    def __init__(self, settings: ApiConfig) -> None:
        """Raises ConfigError when the file of keys, or of the secret, cannot be used."""
        path = settings.tenant_secret_file
        self._secret = read_secret("api.tenant_secret_file", path) if path else None
        self.ring = KeyRing(Path(settings.keys_file).expanduser()) if settings.keys_file else None
        self._default = Limits(settings.requests_per_minute, settings.concurrency)
        self.limiter = Limiter()

    def tenant(self, headers: Headers) -> Tenant:
        """The caller. Raises Unauthorized when keys are asked for and this one is not right."""
        if self.ring is None and self._secret is None:
            return Tenant(limits=self._default)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized(
                "this server asks for a key: send it as `Authorization: Bearer <key>`",
                code="missing_api_key",
            )
        if self.ring is None:
            return self._named(hashlib.sha256(key.encode()).hexdigest()[:16], self._default)
        known = self.ring.authenticate(key)
        return self._named(known.tenant, self._limits(known))

    def by_name(self, name: str) -> Tenant:
        """A tenant whose request was taken earlier: a batch goes on without its caller, under the
        widest limits of the tenant's keys."""
        if not name:
            return Tenant(limits=self._default)
        found = map(self._limits, self.ring.of(name) if self.ring is not None else ())
        widest = max(found, key=lambda one: one.concurrency or math.inf, default=self._default)
        return self._named(name, widest)

    def _limits(self, key: Key) -> Limits:
        return Limits(
            key.requests_per_minute or self._default.requests_per_minute,
            key.concurrency or self._default.concurrency,
        )

    def _named(self, name: str, limits: Limits) -> Tenant:
        from mooncake_serve.store import tenant_salt

        return Tenant(name, tenant_salt(self._secret or b"", name), limits)


class Door:
    """ASGI: lets a request in as its tenant, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, *, keeper: Doorkeeper) -> None:
        self._app = app
        self._keeper = keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; `scope["state"]["tenant"]` holds its tenant from here on."""
        # Serve mounts the application under a prefix; the route is what follows it.
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        tenant = self._keeper.tenant(Headers(scope=scope))
        self._keeper.limiter.enter(tenant.name, tenant.limits, time.monotonic())
        try:
            scope.setdefault("state", {})["tenant"] = tenant
            await self._app(scope, receive, send)
        finally:
            self._keeper.limiter.leave(tenant.name)


def salted(tenant: Tenant, cache_salt: str | None) -> bytes:
    """The root of a request's keys: the tenant's, or one below it for each `cache_salt`."""
    if cache_salt is None:
        return tenant.salt
    from mooncake_serve.store import tenant_salt

    return tenant_salt(b"cache_salt:" + tenant.salt, cache_salt)
