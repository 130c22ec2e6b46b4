"""The Dockerfile says what a pod needs. Building it takes a Docker engine, which is not here."""

from __future__ import annotations

import re

from tests.k8s.schemas import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
STAGES = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


def test_copied_paths_exist_and_reach_the_builder() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        path
        for sources in re.findall(r"^COPY ((?:\S+ )+)\S+$", DOCKERFILE, re.MULTILINE)
        for path in sources.split()
    }
    assert copied == allowed
    assert not [path for path in copied if not (ROOT / path).exists()]


def test_every_crate_of_the_workspace_is_copied() -> None:
    members = re.search(r"members = \[(.*?)\]", (ROOT / "Cargo.toml").read_text(), re.DOTALL)
    assert members is not None
    for crate in re.findall(r'"([\w-]+)"', members[1]):
        assert f"COPY {crate} {crate}" in DOCKERFILE


def test_images_run_without_root() -> None:
    final = [stage for stage in STAGES if stage.startswith("base AS ")]
    assert {stage.split()[2] for stage in final} == {"cpu", "cuda"}
    for stage in final:
        assert "USER 1000:1000" in stage
        assert stage.index("USER 1000:1000") > stage.rindex("pip install")


def test_versions_agree_with_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    cargo = (ROOT / "Cargo.toml").read_text("utf-8")
    version = re.search(r'^version = "([^"]+)"', cargo, re.MULTILINE)
    rust = re.search(r'^rust-version = "([^"]+)"', cargo, re.MULTILINE)
    assert version is not None
    assert rust is not None
    assert f"mooncake-serve:{version[1]}-cpu" in DOCKERFILE
    assert f"FROM rust:{rust[1]}-" in DOCKERFILE
    ray = re.search(r'"ray\[serve\](==[^"]+)"', project)
    assert ray is not None
    assert f"ray[default]{ray[1]}" in DOCKERFILE
    from mooncake_serve.models.embedded import REQUIREMENT

    assert REQUIREMENT in DOCKERFILE
