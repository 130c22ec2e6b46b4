"""Secrets come from files: not from a command line, a manifest or Ray's record of a configuration.

A file is read once, at start. White space at its ends is not part of the secret.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_serve.errors import ConfigError

BYTES_MIN = 16


def read_secret(field: str, path: str) -> bytes:
    """The secret in the file that the setting `field` names. Raises ConfigError."""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as err:
        raise ConfigError(
            field, f"{path}: {err.strerror}; make it with `openssl rand -hex 32`"
        ) from err
    if len(secret) < BYTES_MIN:
        raise ConfigError(
            field, f"{path} holds less than {BYTES_MIN} bytes; `openssl rand -hex 32` makes enough"
        )
    return secret
