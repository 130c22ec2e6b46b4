"""Blocks of a store in a file, in the portable form: to move them to another cluster, or to keep.

An archive is a tar file. `manifest.json` comes first: the format's version, and key and parent of
each block, parents before children. Each block follows as `blocks/<key in hex>`, a container of the
zstd codec, which `mooncake_serve.codec.portable` reads without the extension. Keys name content
under a namespace and a tenant's salt, so blocks are of use only where both are the same.

What leaves the store between listing and reading is left out. A block whose container is damaged,
or whose key is not in the manifest, is never put; a file that is no archive raises ConfigError.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mooncake_serve import codec
from mooncake_serve._store import BlockShape, StoreClient
from mooncake_serve.errors import ConfigError

VERSION = 1
MANIFEST = "manifest.json"
FOLDER = "blocks/"

Link = tuple[bytes, bytes | None]
"""Key of a block, key of its parent."""


@dataclass(slots=True)
class Outcome:
    """What became of the blocks of an archive."""

    blocks: int = 0
    raw_bytes: int = 0
    coded_bytes: int = 0
    present: int = 0
    left_out: int = 0
    """Gone from the store before they were read, damaged, or refused by it."""

    def __str__(self) -> str:
        text = f"{self.blocks} blocks, {self.raw_bytes} bytes, coded {self.coded_bytes}"
        if self.present:
            text += f"; {self.present} were there already"
        return text + (f"; {self.left_out} left out" if self.left_out else "")


def export(client: StoreClient, path: Path) -> Outcome:
    """Write every block that `client`'s store holds.

    Raises StoreError, or ConfigError when the file cannot be made.
    """
    links = parents_first(client.blocks())
    entries = [{"key": key.hex(), "parent": parent and parent.hex()} for key, parent in links]
    manifest = {"format": "mooncake-serve blocks", "version": VERSION, "blocks": entries}
    outcome = Outcome()
    with _create(path) as file, tarfile.open(fileobj=file, mode="w|") as archive:
        _add(archive, MANIFEST, json.dumps(manifest).encode())
        for key, _ in links:
            container = _portable(client, key, outcome)
            if container is None:
                outcome.left_out += 1
                continue
            _add(archive, FOLDER + key.hex(), container)
            outcome.blocks += 1
            outcome.coded_bytes += len(container)
    return outcome


def restore(client: StoreClient, path: Path, tenant: str = "") -> Outcome:
    """Put the blocks of an archive. Raises ConfigError if it is none, or StoreError."""
    outcome = Outcome()
    try:
        with tarfile.open(path, "r|") as archive:
            members = iter(archive)
            parents = _read_manifest(archive, next(members, None), path)
            for member in members:
                container = _contents(archive, member)
                key = bytes.fromhex(member.name.removeprefix(FOLDER))
                if key not in parents:
                    outcome.left_out += 1
                    continue
                _put(client, (key, parents[key]), container, tenant, outcome)
    except (OSError, tarfile.TarError, ValueError) as err:
        raise _not_an_archive(path, str(err)) from err
    return outcome


def parents_first(links: Iterable[Link]) -> list[Link]:
    """Blocks in an order in which they can be put, without those that no root leads to."""
    children: dict[bytes | None, list[bytes]] = {}
    for key, parent in links:
        children.setdefault(parent, []).append(key)
    ordered: list[Link] = []
    level: list[bytes | None] = [None]
    while level:
        found = [(key, parent) for parent in level for key in children.get(parent, ())]
        ordered += found
        level = [key for key, _ in found]
    return ordered


def _portable(client: StoreClient, key: bytes, outcome: Outcome) -> bytes | None:
    (lease,) = client.lease([key])
    if lease is None:
        return None
    with lease:
        shape = lease.shape
    block = bytearray(shape.nbytes)
    if client.read_into([key], [block]) != 1:
        return None
    outcome.raw_bytes += len(block)
    return bytes(codec.encode(block, "zstd", shape))


def _put(client: StoreClient, link: Link, container: bytes, tenant: str, outcome: Outcome) -> None:
    key, parent = link
    shape, _ = codec.inspect(container)
    try:
        block = codec.decode(container)
    except ValueError:
        outcome.left_out += 1
        return
    (status,) = client.put([key], [parent], [block], BlockShape(*shape), tenant)
    if status == "stored":
        outcome.blocks += 1
        outcome.raw_bytes += len(block)
        outcome.coded_bytes += len(container)
    elif status == "present":
        outcome.present += 1
    else:
        outcome.left_out += 1


def _create(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except OSError as err:
        raise ConfigError("archive", f"{path}: {err.strerror}; name a new file") from err


def _add(archive: tarfile.TarFile, name: str, contents: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(contents)
    archive.addfile(member, io.BytesIO(contents))


def _contents(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is not a file")
    return file.read()


def _read_manifest(
    archive: tarfile.TarFile, member: tarfile.TarInfo | None, path: Path
) -> dict[bytes, bytes | None]:
    if member is None or member.name != MANIFEST:
        raise _not_an_archive(path, f"it does not begin with {MANIFEST}")
    manifest = json.loads(_contents(archive, member))
    if manifest.get("version") != VERSION:
        raise _not_an_archive(path, f"version {manifest.get('version')}, not {VERSION}")
    return dict(_links(manifest["blocks"]))


def _links(entries: list[dict[str, Any]]) -> Iterator[Link]:
    for entry in entries:
        parent = entry["parent"]
        yield bytes.fromhex(entry["key"]), bytes.fromhex(parent) if parent else None


def _not_an_archive(path: Path, why: str) -> ConfigError:
    return ConfigError("archive", f"{path} is not an archive of blocks: {why}; export writes one")
