"""Who may use the operators' port: whoever reaches it on loopback, or whoever has its token.

`api.admin_token_file` names the token. A browser asks for it as a password (any user name), other
clients send it as a bearer. Without a token the port is bound to loopback (`config.py`), and then
what a web page makes a browser on that machine do is kept out too: a request must name an address
or `localhost` as its host, so that no other site's name can be bound to ours, and one that changes
something must not come from another origin.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_serve.api.envelope import respond
from mooncake_serve.errors import Forbidden, RequestError, Unauthorized

READS = frozenset({"GET", "HEAD"})
CHALLENGE = 'Basic realm="mooncake_serve operators", charset="UTF-8"'


class OperatorsDoor:
    """ASGI: lets operators in, answers 401 or 403 to everybody else."""

    def __init__(self, app: ASGIApp, *, token: bytes | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, whatever its route."""
        if scope["type"] != "http":
            return  # No route of ours takes another kind.
        headers = Headers(scope=scope)
        try:
            self._check(scope["method"], headers)
        except RequestError as err:
            refusal = respond(err)
            if isinstance(err, Unauthorized):
                refusal.headers["www-authenticate"] = CHALLENGE
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._token is not None:
            if not hmac.compare_digest(_given(headers.get("authorization", "")), self._token):
                raise Unauthorized("operators' token wanted", code="invalid_operators_token")
        elif not _is_address(host):
            raise Forbidden(f"ask for this port by address or as localhost, not as {host[:100]!r}")
        origin = headers.get("origin")
        if method not in READS and origin is not None and urlsplit(origin).netloc != host:
            raise Forbidden("another site's page must not change anything here")


def _given(authorization: str) -> bytes:
    """The token in the header; empty if there is none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(rest, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _is_address(host: str) -> bool:
    """Whether a Host header names an IP address, or this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
