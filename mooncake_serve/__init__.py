"""mooncake_serve: the memory layer for long-context LLM serving on Ray.

The SDK is here; the server's parts are in the subpackages. Importing this brings in neither torch
nor ray.
"""

from importlib.metadata import version as _version

from mooncake_serve.client import AsyncClient, Client, Completion
from mooncake_serve.errors import MooncakeError

__version__ = _version("mooncake-serve")

__all__ = ["AsyncClient", "Client", "Completion", "MooncakeError", "__version__"]
