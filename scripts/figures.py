"""Writes the README's measured tables from `build/*.json`, between its two markers.

Run by `make figures` in the repository's folder, after `make demo` and `make bench`. Figures come
from those files alone: one that is missing is an error, so that the README never shows what this
version has not measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path.cwd()
"""A test runs this in a folder whose README is a link: that one is replaced, not followed."""
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def load(name: str) -> dict[str, Any]:
    """One of the files in `build/`."""
    path = ROOT / "build" / name
    if not path.exists():
        sys.exit(f"{path} is missing: run `make demo EXIT=1` and `make bench` first")
    return json.loads(path.read_text("utf-8"))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def demo(result: dict[str, Any]) -> list[str]:
    """First tokens of the demonstration."""
    cold = result["cold_ttft_s"]
    rows = [("computed", f"{cold:.2f} s", "")]
    for name, key in (("same replica", "same"), ("other replica, from the store", "other")):
        warm = result[f"warm_ttft_{key}_replica_s"]
        rows.append((name, f"{warm:.2f} s", f"{cold / warm:.0f} times"))
    head = (f"{result['prompt_tokens']:,} tokens over HTTP", "first token", "faster")
    return table(head, rows)


def engine(result: dict[str, Any]) -> list[str]:
    """Speed beside transformers in the same run."""
    rows = [
        (f"prefill, {row['tokens']:,} tokens", row["ours_tok_s"], row["generate_tok_s"])
        for row in result["prefill"]
    ]
    rows += [
        (f"decode, batch {row['batch']}", row["ours_tok_s"], row["generate_tok_s"])
        for row in result["decode"]
    ]
    head = (f"{result['backend']} engine, tokens/s", "ours", "`generate`", "ratio")
    return table(
        head,
        [
            (name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
            for name, ours, theirs in rows
        ],
    )


def warm(results: list[dict[str, Any]]) -> list[str]:
    """First tokens from KV that another engine computed."""
    rows = [
        (
            f"{result['backend']}, {row['tokens']:,} tokens",
            f"{row['cold_s']:.2f} s",
            f"{row['pool_s'] * 1e3:.0f} ms",
            f"{row['store_s'] * 1e3:.0f} ms",
        )
        for result in results
        for row in result["warm_ttft"]
    ]
    return table(("first token, in process", "computed", "own pool", "from the store"), rows)


def store(result: dict[str, Any]) -> list[str]:
    """Reads and writes beside Ray's object store in the same run."""
    rows = [
        (
            f"read {row['bytes'] / 2**20:g} MiB, verified",
            f"{row['ours_gb_s']:.1f}",
            f"{row['ray_get_copy_gb_s']:.1f}",
        )
        for row in result["read_into"]
        if row["codec"] == "none" and row["bytes"] >= 1 << 20
    ]
    rows += [
        (
            f"put {row['bytes'] / 2**20:g} MiB",
            f"{row['ours_gb_s']:.1f}",
            f"{row['ray_put_gb_s']:.1f}",
        )
        for row in result["put"]
        if row["bytes"] >= 1 << 20
    ]
    return table(("store, GB/s", "ours", "Ray's object store"), rows)


def main() -> None:
    """Rewrite the section."""
    engines = [load(f"bench-engine-{backend}.json") for backend in ("native", "torch")]
    stores = load("bench-store.json")
    machine = engines[0]["machine"]
    versions = ", ".join(dict.fromkeys(each["version"] for each in (*engines, stores)))
    where = f"Measured on {machine['cores']} cores of {machine['cpu']}, {versions}"
    lines = [f"{where}, by `make demo` and `make bench`: SmolLM2-135M in bf16.", ""]
    tables = [demo(load("demo.json")), warm(engines), *map(engine, engines)]
    for each in [*tables, store(stores)]:
        lines += [*each, ""]
    readme = ROOT / "README.md"
    before, rest = readme.read_text("utf-8").split(BEGIN)
    _, after = rest.split(END)
    written = ROOT / "build" / "README.md"
    written.write_text("\n".join([before + BEGIN, *lines, END + after]), "utf-8")
    written.replace(readme)


if __name__ == "__main__":
    main()
