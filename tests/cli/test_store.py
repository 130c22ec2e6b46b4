"""`mooncake-serve store …` outside Ray: what it ends, what it refuses to end, what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.app.check import store_settings
from mooncake_serve.cli.store import parse_size
from mooncake_serve.errors import ConfigError
from mooncake_serve.store import BlockShape, StoreClient, StoreServer, block_keys

COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
DRAM = 64 << 20


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mooncake-") as directory:
        yield Path(directory) / "store.sock"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **environment},
    )


def test_stop_ends_a_store_process(socket: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "store", "--dram", "64MiB", "--ingest", "4MiB", "--socket", str(socket)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = [process.stderr.readline(), process.stderr.readline()]
        assert f"pid {process.pid}" in said[1], said
        stopped = run("store", "stop", "--socket", str(socket))
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_store_answers_scrapes(socket: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "store", "--dram", "64MiB", "--socket", str(socket), "--metrics", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        url = said[2].removeprefix("metrics on ").strip()
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            scraped = answer.read().decode()
        assert "mooncake_store_dram_bytes 6.7108864e+07" in scraped
        assert 'mooncake_store_bytes{state="free",tier="dram"}' in scraped
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("address", ["9400", "host:port", ":1", "192.0.2.1:9400"])
def test_metrics_need_an_address_to_listen_on(socket: Path, address: str) -> None:
    done = run("store", "--dram", "64MiB", "--socket", str(socket), "--metrics", address)
    assert done.returncode == 1
    assert "--metrics" in done.stderr


def test_stop_leaves_other_programs_alone(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=DRAM) as server:
        refused = run("store", "stop", "--socket", str(socket))
        assert refused.returncode == 1
        assert str(server.pid) in refused.stderr
        assert server.is_running


def test_stop_of_nothing_says_so(socket: Path) -> None:
    refused = run("store", "stop", "--socket", str(socket))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr


def test_stats_finds_the_machines_store_past_a_dead_socket(socket: Path) -> None:
    folder = socket.parent / f"mooncake-serve-{os.getuid()}"
    with StoreServer(socket=folder / "a.sock", dram_bytes=DRAM):
        (folder / "b.sock").touch()
        shown = run("store", "stats", XDG_RUNTIME_DIR=str(socket.parent))
    assert shown.returncode == 0, shown.stderr
    assert str(DRAM) in shown.stdout
    nobody = run("store", "stats", XDG_RUNTIME_DIR=str(socket.parent))
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "--socket" in nobody.stderr


@pytest.mark.parametrize(("text", "size"), [("512MiB", 1 << 29), ("4GiB", 1 << 32), ("4096", 4096)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--dram", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "GiB", "1 parsec"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--dram"):
        parse_size("--dram", text)


def test_settings_of_a_config_file(tmp_path: Path) -> None:
    shipped = (ROOT / "deployments" / "app.yaml").read_text("utf-8")
    assert store_settings(ROOT / "deployments" / "app.yaml").dram == 2 << 30
    wrong = tmp_path / "app.yaml"
    wrong.write_text(shipped.replace("mooncake_serve.app:build", "another:app"))
    with pytest.raises(ConfigError, match="store"):
        store_settings(wrong)


def test_operators_see_check_pin_and_drop_blocks(socket: Path) -> None:
    folder = socket.parent / "disk"
    options = {"nvme_path": folder, "nvme_bytes": 32 << 20}
    with StoreServer(socket=socket, dram_bytes=DRAM, **options):
        keys = block_keys("cli", b"", range(3), 1)
        with StoreClient.connect(socket) as client:
            client.put(keys, [None, *keys[:-1]], [bytes(5000)] * 3, BlockShape.opaque(5000), "acme")
        on = ("--socket", str(socket))
        assert run("store", "drain", *on).stdout.startswith("3 blocks")
        listed = run("store", "list", *on, "--json").stdout.splitlines()
        rows = [json.loads(line) for line in listed]
        assert {row["key"] for row in rows} == {key.hex() for key in keys}
        assert {row["tenant"] for row in rows} == {"acme"}
        assert all(row["nvme_bytes"] == row["dram_bytes"] for row in rows)
        assert run("store", "verify", *on).stdout.startswith("6 copies")
        assert run("store", "pin", keys[0].hex(), *on).stdout.startswith("1 blocks pinned")
        assert run("store", "evict", keys[2].hex(), *on).stdout.startswith("1 blocks dropped")
        assert len(run("store", "list", *on).stdout.splitlines()) == 2
        wrong = run("store", "evict", "not hex", *on)
        assert (wrong.returncode, "store list" in wrong.stderr) == (1, True)


def test_bench_times_a_live_store_and_leaves_nothing(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=DRAM) as server:
        on = ("--socket", str(socket), "--bytes", "64KiB", "--blocks", "8")
        measured = json.loads(run("store", "bench", *on, "--json").stdout)
        assert (measured["bytes"], measured["blocks"], measured["missing"]) == (65536, 8, 0)
        for call in ("put", "read_into", "lease_release", "match"):
            assert measured[f"{call}_us_p50"] > 0
        assert "read_into_gb_s" in run("store", "bench", *on).stdout
        stats = server.stats()
        assert (stats["blocks"], stats["leases"]) == (0, 0)
        assert stats["puts_stored"] == 16
        wrong = run("store", "bench", "--socket", str(socket), "--bytes", "1GiB")
        assert wrong.returncode == 1
        assert "Traceback" not in wrong.stderr


def test_sigterm_writes_memory_to_disk(socket: Path) -> None:
    nvme = ("--nvme", str(socket.parent / "disk"), "--nvme-bytes", "64MiB")
    command = [COMMAND, "store", "--dram", "64MiB", "--socket", str(socket), *nvme]
    keys = block_keys("sigterm", b"", range(5), 1)
    blocks = [bytes([at]) * 5000 for at in range(5)]

    def serving() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        while "store serves" not in (line := process.stderr.readline()):
            assert line, "it ended before it served"
        return process

    process = serving()
    try:
        with StoreClient.connect(socket) as client:
            client.put(keys, [None, *keys[:-1]], blocks, BlockShape.opaque(5000))
            assert client.stats()["nvme_blocks"] == 0, "nobody has read them"
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        process = serving()
        with StoreClient.connect(socket) as client:
            assert client.stats()["nvme_recovered_blocks"] == 5
            buffers = [bytearray(5000) for _ in keys]
            assert client.read_into(keys, buffers) == 5
            assert buffers == blocks
    finally:
        process.kill()
        process.wait()
