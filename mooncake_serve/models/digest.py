"""What the weights are: a digest of every file that decides the model's function.

Reading gigabytes at each start would be slow, so the digest is cached under the files' names,
sizes and modification times. A copy of the same model elsewhere has the same digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mooncake_serve.models.cache import cache_dir, write_atomic
from mooncake_serve.models.gguf import file_sha256
from mooncake_serve.progress import shown


def weights_digest(folder: Path) -> str:
    """Hex digest over `config.json` and every safetensors file of the folder."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    stats = [(file, file.stat()) for file in files]
    stamp = "\n".join(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
    entry = cache_dir() / "digests" / hashlib.sha256(stamp.encode()).hexdigest()
    if entry.is_file():
        return entry.read_text()
    with shown(f"checking the weights in {folder}; this happens once", announce=False):
        content = "\n".join(f"{file.name} {file_sha256(file)}" for file in files)
    digest = hashlib.sha256(content.encode()).hexdigest()
    write_atomic(entry, digest)
    return digest
