"""The Dockerfile says what a pod needs, and its steps work as far as they can without an engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.k8s.dockerfile import Stage, context, lineage, stages
from tests.k8s.schemas import ROOT

STAGES = stages()
FINAL = {"cpu", "cuda"}
BUILD_S = 1500.0


def everything(stage: Stage, instruction: str) -> list[str]:
    """Values of an instruction over a stage and what it is built on, the first first."""
    return [value for one in reversed(list(lineage(stage))) for value in one.all(instruction)]


def test_stages() -> None:
    assert set(STAGES) == {"wheel", "base"} | FINAL
    for name in FINAL:
        assert STAGES[name].base == "base"
    for stage in STAGES.values():
        assert ":" in stage.base or stage.base in STAGES, f"{stage.base} has no version"
        assert not re.search(r":latest\b", stage.base)


def test_copied_paths_exist_and_reach_the_builder(tmp_path: Path) -> None:
    copied = {
        path
        for stage in STAGES.values()
        for value in stage.all("COPY")
        for path in shlex.split(value)[:-1]
    }
    given = context(tmp_path)
    assert copied == {path.name for path in given.iterdir()}
    assert not list(given.rglob("*.so")), "a wheel must not hold this machine's build"
    assert not list(given.rglob("target"))


def test_every_crate_of_the_workspace_is_copied() -> None:
    members = re.search(r"members = \[(.*?)\]", (ROOT / "Cargo.toml").read_text(), re.DOTALL)
    assert members is not None
    for crate in re.findall(r'"([\w-]+)"', members[1]):
        assert f"{crate} {crate}" in STAGES["wheel"].all("COPY")


@pytest.mark.parametrize("name", sorted(FINAL))
def test_images_run_without_root(name: str) -> None:
    stage = STAGES[name]
    assert everything(stage, "USER") == ["1000:1000"]
    after = stage.steps[stage.steps.index(("USER", "1000:1000")) :]
    assert {instruction for instruction, _ in after} <= {"USER", "EXPOSE", "CMD"}
    assert any("--uid 1000" in value for value in everything(stage, "RUN"))


@pytest.mark.parametrize("name", sorted(FINAL))
def test_the_command_is_one_that_exists_on_a_path_that_is_copied(name: str) -> None:
    (command,) = STAGES[name].all("CMD")
    program, verb, config = re.findall(r'"([^"]+)"', command)
    assert (program, verb) == ("mooncake-serve", "serve")
    (source, target) = next(value.split() for value in STAGES[name].all("COPY"))
    assert (ROOT / source / Path(config).relative_to(target)).is_file()


def test_shell_steps_parse() -> None:
    for stage in STAGES.values():
        for value in stage.all("RUN"):
            script = re.sub(r"--mount=\S+\s*", "", value)
            ran = subprocess.run(
                ["sh", "-n", "-c", script], capture_output=True, text=True, timeout=60, check=False
            )
            assert ran.returncode == 0, f"{script}: {ran.stderr}"


def test_no_secret_is_baked_in() -> None:
    for stage in STAGES.values():
        for name, value in stage.steps:
            assert name not in {"ARG", "ADD"}, value
            assert not re.search(r"(?i)(secret|token|password|api_key)\s*=", value), value


def test_packages_of_debian_exist() -> None:
    if not shutil.which("apt-cache"):
        pytest.skip("no apt here to ask")
    for stage in STAGES.values():
        for value in stage.all("RUN"):
            named = re.search(r"apt-get install -y --no-install-recommends ([\w+. -]+?) &&", value)
            for package in named[1].split() if named else []:
                asked = ["apt-cache", "show", "--no-all-versions", package]
                found = subprocess.run(asked, capture_output=True, timeout=60, check=False)
                assert found.returncode == 0, package


def test_versions_agree_with_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    cargo = (ROOT / "Cargo.toml").read_text("utf-8")
    version = re.search(r'^version = "([^"]+)"', cargo, re.MULTILINE)
    rust = re.search(r'^rust-version = "([^"]+)"', cargo, re.MULTILINE)
    assert version is not None
    assert rust is not None
    assert f"mooncake-serve:{version[1]}-cpu" in (ROOT / "Dockerfile").read_text("utf-8")
    assert STAGES["wheel"].base.startswith(f"rust:{rust[1]}-")
    ray = re.search(r'"ray\[serve\](==[^"]+)"', project)
    assert ray is not None
    for name in FINAL:
        assert any(f"ray[default]{ray[1]}" in value for value in STAGES[name].all("RUN"))
    from mooncake_serve.models.embedded import REQUIREMENT

    assert any(REQUIREMENT in value for value in STAGES["base"].all("RUN"))


@pytest.mark.slow
@pytest.mark.timeout(BUILD_S + 300)
def test_the_wheel_builds_from_what_the_builder_gets_and_runs(tmp_path: Path) -> None:
    """The steps of stage `wheel`, and what the final stages install of it, in plain folders."""
    source = tmp_path / "src"
    source.mkdir()
    context(source)
    (command,) = [value for value in STAGES["wheel"].all("RUN") if "maturin build" in value]
    words = shlex.split(re.sub(r"--mount=\S+\s*", "", command))
    words = [str(Path(sys.executable).with_name("maturin")), *words[1:]]
    words = [str(tmp_path / "wheels") if word == "/wheels" else word for word in words]
    # Crates that this machine has compiled already need not be compiled again.
    own = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")}
    built = subprocess.run(
        words, cwd=source, env=own, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert built.returncode == 0, built.stderr[-4000:]
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "_store.abi3.so",
        "dashboard/static/index.html",
        "dashboard/static/uplot/LICENSE",
    ):
        assert f"mooncake_serve/{needed}" in names
    assert not [name for name in names if name.startswith(("tests", "docs"))]
    # Everything but the wheel is this environment's; the wheel comes first.
    venv.create(tmp_path / "opt", with_pip=True)
    python = tmp_path / "opt" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    others = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p),
    }
    script = tmp_path / "opt" / "bin" / "mooncake-serve"
    for arguments in (["version"], ["check", str(ROOT / "deployments" / "app.yaml")]):
        ran = subprocess.run(
            [script, *arguments],
            cwd=tmp_path,
            env=others,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
