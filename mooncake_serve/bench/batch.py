"""`bench batch`: jobs over shared documents, as `mooncake-serve batch run` runs them.

Three runs at the same concurrency, on the application of `deployments/app.yaml` with a pool of KV
that is smaller in the same measure as the documents: as with documents of 5,000 tokens and the
shipped pool, it holds those that are asked about right now, and not all of them.

    baseline   the store off, the jobs in random order, a plain bounded loop
    batch      the store on, the command line's own order; documents nobody has seen
    killed     other documents; the client is killed once, and once every process of the
               application (ingress and replicas) with SIGKILL; then the command is run to its end
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.bench.serving import Serving, shipped_args
from mooncake_serve.bench.workloads import prose
from mooncake_serve.client import AsyncClient, Client, Job, read_jobs
from mooncake_serve.errors import BatchError

RUN_WAIT_S = 1800.0
POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when every job is in the output exactly once."""
    parser = argparse.ArgumentParser("mooncake-serve bench batch", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--document-words", type=int, default=1300)
    parser.add_argument("--pool", default="256MiB", help="engine.pool of every run")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--json", action="store_true", help="accepted: the output is always JSON")
    chosen = parser.parse_args(argv)
    if chosen.quick:
        chosen.jobs, chosen.documents, chosen.document_words = 24, 3, 600
    with tempfile.TemporaryDirectory() as folder, Serving() as serving:
        result = _measure(chosen, Path(folder), serving)
    emit({**result, "machine": machine(), "version": version(), "runs": 1})
    return 0 if result["complete"] and not result["duplicates"] else 1


def _measure(chosen: argparse.Namespace, folder: Path, serving: Serving) -> dict[str, Any]:
    jobs = _write_jobs(folder / "in.jsonl", chosen, chosen.seed)
    progress("baseline: store off, random order")
    engine = {"pool": chosen.pool}
    url = serving.run("off", shipped_args(engine=engine, store={"enabled": False}))
    baseline_s = asyncio.run(_random_order(url, jobs, chosen))
    serving.delete("off")
    progress(f"{baseline_s:.1f} s; batch: store on, grouped")
    url = serving.run("on", shipped_args(engine=engine))
    _warm_up(url)
    began = time.perf_counter()
    _finish(_command(folder / "in.jsonl", folder / "out.jsonl", url, chosen))
    wall_s = time.perf_counter() - began
    progress(f"{wall_s:.1f} s; killing client and server")
    _write_jobs(folder / "in2.jsonl", chosen, chosen.seed + 1)
    _killed(folder / "in2.jsonl", folder / "out2.jsonl", url, chosen, serving)
    counts = [Counter(_names(folder / name)) for name in ("out.jsonl", "out2.jsonl")]
    return {
        "jobs": chosen.jobs,
        "documents": chosen.documents,
        "concurrency": chosen.concurrency,
        "document_words": chosen.document_words,
        "pool": chosen.pool,
        "wall_s": round(wall_s, 2),
        "baseline_wall_s": round(baseline_s, 2),
        "ratio": round(wall_s / baseline_s, 3),
        "complete": all(len(count) == chosen.jobs for count in counts),
        "duplicates": sum(sum(count.values()) - len(count) for count in counts),
        "cached_share": round(_cached_share(folder / "out.jsonl"), 4),
        "killed": {"client": 1, "server": 1, "jobs": len(counts[1])},
    }


def _write_jobs(path: Path, chosen: argparse.Namespace, seed: int) -> list[Job]:
    """Questions about documents, in random order, as a user's file may be."""
    texts = [prose(chosen.document_words, 1000 * seed + n) for n in range(chosen.documents)]
    lines = []
    for number in range(chosen.jobs):
        question = f"\n\nQuestion {number}: {prose(10, 77 * seed + number)}?"
        content = texts[number % chosen.documents] + question
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": chosen.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append({"custom_id": f"job-{number}", "url": "/v1/chat/completions", "body": body})
    random.Random(seed).shuffle(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return read_jobs(path)


async def _random_order(url: str, jobs: Sequence[Job], chosen: argparse.Namespace) -> float:
    """Seconds of a plain bounded loop over the jobs as they come."""
    _warm_up(url)
    waiting = iter(jobs)
    async with AsyncClient(url) as client:

        async def one_client() -> None:
            for job in waiting:
                await client.chat(**dict(job.body))

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(chosen.concurrency)))
        return time.perf_counter() - began


def _warm_up(url: str) -> None:
    """One short request on every replica."""
    with Client(url) as client:
        for replica in range(2):
            client.chat("Warm up.", max_tokens=8, replica=replica)


def _command(jobs: Path, output: Path, url: str, chosen: argparse.Namespace) -> list[str]:
    script = "from mooncake_serve.cli import main; main()"
    options = ["-o", str(output), "--url", url, "--concurrency", str(chosen.concurrency)]
    return [sys.executable, "-c", script, "batch", "run", str(jobs), *options]


def _finish(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, timeout=RUN_WAIT_S, check=False)
    if done.returncode != 0:
        raise BatchError(done.stderr.decode(errors="replace")[-2000:])


def _killed(
    jobs: Path, output: Path, url: str, chosen: argparse.Namespace, serving: Serving
) -> None:
    """Kill the client at a quarter of the jobs, the application at half, then let it end."""
    command = _command(jobs, output, url, chosen)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _until(output, chosen.jobs // 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _until(output, chosen.jobs // 2, process)
    for pid in serving.replica_pids("on"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.wait(RUN_WAIT_S) != 0:
        raise BatchError("the batch did not end after the application was killed")


def _until(output: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + RUN_WAIT_S
    while not output.exists() or len(_names(output)) < lines:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BatchError(f"the batch ended before {lines} jobs were done")
        time.sleep(POLL_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_bytes()
    return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]


def _names(path: Path) -> list[str]:
    """Of jobs that were answered well."""
    lines = _lines(path)
    return [line["custom_id"] for line in lines if line["response"]["status_code"] == 200]


def _cached_share(path: Path) -> float:
    usages = [line["response"]["body"]["usage"] for line in _lines(path)]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return cached / sum(usage["prompt_tokens"] for usage in usages)
