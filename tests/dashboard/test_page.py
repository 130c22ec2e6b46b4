"""The operators' page in a real browser, over made-up data.

Screenshots go to `build/dashboard/`, for a person to look at.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from mooncake_serve.api.gateway import Reason
from mooncake_serve.dashboard import HEADERS, STATIC, install
from mooncake_serve.errors import NotFound
from tests.waiting import WAIT_S, eventually

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
SHOTS = Path(__file__).resolve().parents[2] / "build" / "dashboard"
QUIET = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
OFFLINE = ("disable-background-networking", "disable-component-update")
GIB = 1 << 30
MARKUP = "<img src=x onerror=alert(1)>"


def made_up() -> dict[str, Any]:
    now = time.time()
    states = {"free": GIB, "reserved": GIB // 8, "resident": 5 * GIB, "leased": GIB // 2}
    tier: dict[str, Any] = {
        "tier": "dram",
        "capacity": 8 * GIB,
        "states": states,
        "logical": 7 * GIB,
    }
    tier["saved"] = {"codec": 1.4 * GIB, "sharing": 21 * GIB}
    nvme: dict[str, Any] = {"tier": "nvme", "capacity": 64 * GIB, "logical": 0, "saved": {}}
    nvme["states"] = {"resident": 40 * GIB}
    engine = {
        "running": 3,
        "waiting": 1,
        "outstanding_prefill_tokens": 4096,
        "pool_blocks": 100,
        "pool_free_blocks": 60,
        "generated_tokens": 12_345,
    }
    decision = {
        "request_id": "0f1e2d3c4b5a",
        "at": now - 3,
        "replica": "r1abcdefgh",
        "reason": "least_time",
        "prompt_tokens": 6643,
        "queue_s": 0.12,
        "load_s": 0.05,
        "prefill_s": 0.21,
        "matched_tokens": 6400,
        "ttft_s": 0.43,
        "cached_tokens": 6400,
    }
    return {
        "at": now,
        "model": MARKUP,
        "saved_prefill_s": 845.0,
        "nodes": [
            {
                "node": "ab" * 28,
                "address": "10.0.0.1",
                "tiers": [tier, nvme],
                "sessions": 3,
                "evictions": 17,
                "uptime_s": 7260,
            },
            {"node": "cd" * 28, "address": "10.0.0.2", "tiers": None},
        ],
        "replicas": [
            {"replica": "r1abcdefgh", "node": "ab" * 28, "engine": engine},
            {"replica": "r2abcdefgh", "node": "cd" * 28, "engine": None},
        ],
        "hottest": [{"key": "00ff" * 4, "requests": 41, "cached_tokens": 6400}],
        "decisions": [decision, {**decision, "request_id": "ffee", "ttft_s": None}],
        "history": [
            {
                "at": now - 10 * (60 - step),
                "prompt_tokens": 1000,
                "cached_tokens": 10 * step,
                "ttft_p50_s": 0.9 - step / 100,
                "ttft_p95_s": 1.5 - step / 100,
            }
            for step in range(60)
        ],
    }


class Served:
    """The page on loopback, with data that a test may change."""

    def __init__(self) -> None:
        self.data = made_up()
        self.asked = 0
        app = FastAPI()
        install(app, self._overview)
        app.add_exception_handler(NotFound, self._not_found)
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/dashboard/"

    async def _not_found(self, request: Request, error: Exception) -> Response:
        del request
        return Response(str(error), 404)

    async def _overview(self) -> dict[str, Any]:
        self.asked += 1
        return {**self.data, "at": time.time()}

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)


@pytest.fixture
def served() -> Iterator[Served]:
    started = Served()
    yield started
    started.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[f"--{flag}" for flag in (*QUIET, *OFFLINE)]
        )
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, live. Fails on any error in it, and on any request elsewhere."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    opened.on(
        "request",
        lambda asked: (
            asked.url.startswith((served.url, "data:")) or complaints.append(f"asked {asked.url}")
        ),
    )
    opened.goto(served.url)
    opened.wait_for_selector("#status:has-text('live')")
    yield opened
    opened.close()
    assert not [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text]


def shot(page: Any, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


def test_everything_is_on_the_page(page: Any) -> None:
    text = page.inner_text("main")
    assert "Memory: 5.6 GiB of 8.0 GiB in use" in text
    assert "Saved: 1.4 GiB by encoding, 21.0 GiB by sharing." in text
    assert "NVMe: 40.0 GiB of 64.0 GiB in use" in text
    assert text.count("Saved:") == 1
    assert not [note for note in page.locator("#nodes .note").all_inner_texts() if not note]
    assert "Its store does not answer" in text
    assert "does not answer" in page.inner_text("#replicas tr:nth-child(2)")
    assert "00ff00ff00ff00ff" in text
    assert "4,096" in page.inner_text("#replicas tr:nth-child(1)")
    assert "Node abababab, 10.0.0.1" in text
    assert page.locator(".chart canvas").count() == 2
    # Without a pointer the legends tell the newest values.
    assert "59 %" in page.inner_text("#hits .u-legend")
    assert "310 ms" in page.inner_text("#ttft .u-legend")
    assert page.get_attribute("#hits", "aria-label").endswith("59 %")
    shot(page, "light")


def test_text_from_the_server_is_never_markup(page: Any) -> None:
    assert page.inner_text("#model") == MARKUP
    assert page.locator("img").count() == 0


def test_a_route_explains_itself_by_keyboard(page: Any) -> None:
    first = page.locator("#routes button").first
    first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#routes .detail")
    told = page.inner_text("#routes .detail")
    assert "Replica r1abcdefgh had the least expected time" in told
    assert "It was expected to take 380 ms, with 6,400 of 6,643 tokens in its caches." in told
    assert "It took 430 ms, with 6,400 tokens cached." in told
    assert page.evaluate("document.activeElement.dataset.route") == "0f1e2d3c4b5a"
    page.keyboard.press("Enter")
    assert page.locator("#routes .detail").count() == 0


def test_a_route_says_why_for_every_reason(page: Any, served: Served) -> None:
    """Each reason that the gateway gives has a sentence of its own."""
    (decision, _) = served.data["decisions"]
    sentences = set()
    for reason in get_args(Reason):
        served.data["decisions"] = [{**decision, "request_id": reason, "reason": reason}]
        page.locator(f"#routes [data-route={reason}]").click()
        told = page.inner_text("#routes .detail")
        assert "r1abcdefgh" in told
        sentences.add(told.partition(" was expected")[0])
        assert ("least expected time" in told) == (reason in {"least_time", "replica_died"})
        assert ("The planned one was expected" in told) == (reason == "elsewhere")
    assert len(sentences) == len(get_args(Reason))


def test_every_control_is_reached_by_tab(page: Any) -> None:
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset.route "
                "|| document.activeElement.className"
            )
        )
    assert [name for name in seen if name][:7] == [
        "skip",
        "pause",
        "theme",
        "scroll",
        "scroll",
        "0f1e2d3c4b5a",
        "ffee",
    ]


def test_it_follows_the_server_and_says_when_it_is_gone(page: Any, served: Served) -> None:
    served.data["hottest"] = [{"key": "abcd" * 4, "requests": 1, "cached_tokens": 0}]
    page.wait_for_selector("#hottest:has-text('abcdabcdabcdabcd')")
    page.click("#pause")
    assert page.inner_text("#status") == "paused"
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.click("#pause")
    served.close()
    page.wait_for_selector("#status.bad")
    assert "no answer from the server" in page.inner_text("#status")


def test_dark_by_choice_and_by_system(browser: Any, page: Any, served: Served) -> None:
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.select_option("#theme", "dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    page.wait_for_selector("#status:has-text('live')")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.locator("#routes button").first.click()
    shot(page, "dark")
    context = browser.new_context(color_scheme="dark")
    other = context.new_page()
    other.goto(served.url)
    assert other.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    context.close()


def test_it_fits_a_phone(browser: Any, served: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740})
    phone = context.new_page()
    phone.goto(served.url)
    phone.wait_for_selector("#status:has-text('live')")
    phone.locator("#routes button").first.click()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    # Tables too: a row is a list of names and values, and still a row to a screen reader.
    for box in phone.locator(".scroll").all():
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    replica = phone.get_by_role("row").filter(has_text="r1abcdefgh")
    assert replica.get_by_role("cell").count() == 6
    named = replica.locator("td").evaluate_all("cells => cells.map(cell => cell.dataset.name)")
    assert named == ["node", "running", "waiting", "tokens to prefill", "pool in use", "generated"]
    shot(phone, "phone")
    context.close()


def test_an_idle_server_has_a_page_too(browser: Any, served: Served) -> None:
    empty = ("nodes", "replicas", "hottest", "decisions", "history")
    served.data |= {name: [] for name in empty}
    opened = browser.new_page()
    opened.goto(served.url)
    opened.wait_for_selector("#status:has-text('live')")
    assert "No request has ended yet." in opened.inner_text("#hits")
    assert "No store runs" in opened.inner_text("#nodes")
    assert "No replica runs" in opened.inner_text("#replicas")
    assert "No prompt of a whole block" in opened.inner_text("#hottest")
    assert "No request has come yet." in opened.inner_text("#routes")
    shot(opened, "idle")
    opened.close()


def test_many_pages_cost_one_collection(served: Served) -> None:
    import httpx

    with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
        for _ in range(20):
            assert client.get("data").status_code == 200
        assert served.asked < 20
        answer = client.get("")
        assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
        for path in ("static/../__init__.py", "static/%2e%2e/__init__.py", "static/nothing.js"):
            assert client.get(path).status_code == 404


def test_nothing_comes_from_elsewhere() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in {".html", ".css", ".js"} and path.parent.name != "uplot":
            assert not re.search(r"https?://", path.read_text("utf-8")), path
    assert "MIT" in (STATIC / "uplot" / "LICENSE").read_text("utf-8")
