"""The simulator through its Python face, on generated traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_serve.errors import ConfigError
from mooncake_serve.simulate import ROUTERS, Options, Profile, Trace, main, simulate
from mooncake_serve.simulate.plots import WINDOWS, imbalance_over_time, windows

PROFILE = Profile.load("a800x8-llama70b")
KEYS = {
    "trace", "nodes", "router", "policy", "speed", "dram_blocks", "nvme_blocks", "requests",
    "rejected", "hit_rate", "hit_rate_by_tier", "imbalance", "ttft_s", "queue_s", "profile",
    "wall_s", "machine", "version", "runs",
}  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.generate(seed=1, requests=1200)


@pytest.fixture
def trace_file(trace: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace.text())
    return path


def test_the_same_seed_gives_the_same_report(trace: Trace) -> None:
    for router in ROUTERS:
        options = Options(nodes=4, router=router, series=True, seed=3)
        first = simulate(trace, PROFILE, options)
        assert simulate(trace, PROFILE, options) == first
        assert first["requests"] == trace.requests == 1200


def test_a_generated_trace_has_the_shape_of_a_chat_service(trace: Trace) -> None:
    requests = [json.loads(line) for line in trace.text().splitlines()]
    lengths = sorted(request["input_length"] for request in requests)
    assert 4_000 < lengths[len(lengths) // 2] < 12_000
    assert lengths[-1] <= 126_000
    shared = {request["hash_ids"][0] for request in requests}
    assert len(shared) == 1, "all sessions share the system prompt"
    report = simulate(trace, PROFILE, Options(nodes=1, dram_blocks=100_000, policy="lru"))
    assert 0.15 < report["hit_rate"] < 0.5
    assert Trace.generate(seed=2, requests=50).text() != Trace.generate(seed=3, requests=50).text()


def test_peers_tiers_and_refusals_show_in_the_report(trace: Trace) -> None:
    small = Options(nodes=3, dram_blocks=1500)
    blind = small.but(router="round-robin")
    alone = simulate(trace, PROFILE, blind.but(peers=False))
    shared = simulate(trace, PROFILE, blind)
    deep = simulate(trace, PROFILE, small.but(nvme_blocks=8000, device_blocks=200))
    assert alone["hit_rate_by_tier"]["peer"] == 0 < shared["hit_rate_by_tier"]["peer"]
    assert alone["hit_rate"] < shared["hit_rate"] < deep["hit_rate"]
    assert min(deep["hit_rate_by_tier"].values()) > 0
    strict = simulate(trace, PROFILE, small.but(nodes=1, slo_s=20.0))
    assert strict["rejected"] > 0
    # What is predicted to be cached may have been evicted when its turn comes.
    assert strict["ttft_s"]["p99"] <= 1.25 * 20.0


def test_json_holds_the_promised_keys(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trace_file), "--nodes", "4", "--dram-blocks", "3000", "--json"]
    assert main([*arguments, "--nvme-blocks", "100", "--hints", "oracle:0.8", "--no-reject"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= KEYS
    assert (report["trace"], report["nodes"], report["rejected"]) == ("trace.jsonl", 4, 0)
    assert set(report["ttft_s"]) == {"mean", "p50", "p99"}


def test_sweeps_print_a_row_per_cell(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--nodes", "2,4", "--loads", "0.1,0.2", "--routers", "ours,pow2", "--no-reject"]
    main(["sweep", str(trace_file), *grid])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [
        ["2", "x0.2"], ["2", "x0.4"], ["4", "x0.4"], ["4", "x0.8"],
    ]  # fmt: skip
    main(["policies", str(trace_file), "--capacities", "500,2000", "--json"])
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert len(cells) == 10
    best = {cell["blocks"]: cell["hit_rate"] for cell in cells if cell["policy"] == "belady"}
    assert all(cell["hit_rate"] <= best[cell["blocks"]] for cell in cells)


def test_generate_writes_what_simulate_reads(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    main(["generate", str(path), "--seed", "5", "--requests", "40"])
    assert Trace.load(path, 512).requests == 40


def test_plots_are_written(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")
    folder = tmp_path / "plots"
    assert main([str(trace_file), "--nodes", "4", "--plots", str(folder), "--json"]) == 0
    for name in ("ttft_cdf.png", "hit_rate.png", "imbalance.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_windows_keep_the_sums() -> None:
    ends, (sums,) = windows([0.0, 1.0, 2.0, 120.0], [[1.0, 2.0, 3.0, 4.0]])
    assert (len(ends), ends[-1], sum(sums)) == (WINDOWS, 120.0, 10.0)
    assert (sums[0], sums[1], sums[-1]) == (3.0, 3.0, 4.0)
    series = {"arrival_s": [0.0, 0.0, 60.0], "work_s": [3.0, 1.0, 2.0], "node": [0, 1, 0]}
    uneven = imbalance_over_time(series, nodes=2)
    assert (uneven[0], uneven[-1], uneven[5]) == (1.5, 2.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl"),
        (["TRACE", "--nodes", "0"], "nodes is 0"),
        (["TRACE", "--profile", "h100"], "a800x8-llama70b"),
        (["TRACE", "--slice", "0.7:0.2"], "slice"),
        (["TRACE", "--speed", "0"], "speed is 0"),
        (["sweep", "TRACE", "--routers", "best"], "use ours, round-robin"),
    ],
)
def test_mistakes_name_the_fix(trace_file: Path, arguments: list[str], message: str) -> None:
    words = [str(trace_file) if word == "TRACE" else word for word in arguments]
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n')
    with pytest.raises(ConfigError, match="line 1"):
        Trace.load(path, 512)
