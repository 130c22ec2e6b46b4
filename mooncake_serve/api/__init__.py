"""The OpenAI-compatible HTTP front: `create_app` over anything that generates."""

from mooncake_serve.api.server import create_app

__all__ = ["create_app"]
