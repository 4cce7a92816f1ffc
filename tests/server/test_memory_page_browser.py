"""The memory page in a real Chromium: it draws what the engine has, follows it, and outlives a server's restart."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import pytest
import wanted
from fastapi import Depends, FastAPI, Header, HTTPException
from scripted_engine import ScriptedEngine, busy_engine

from jpaged import MemoryMap
from jpaged.memory import BlockState
from jpaged.server.memory_page import memory_routes

uvicorn = pytest.importorskip("uvicorn")

pytestmark = pytest.mark.nightly

PIXEL = """page => {
  const map = document.getElementById("map"), scale = devicePixelRatio;
  const [side, columns] = [map.dataset.side, map.dataset.columns].map(Number);
  const [x, y] = [1 + page % columns * side + side / 4, 1 + Math.floor(page / columns) * side + side / 4];
  return [...map.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data];
}"""
"""Reads the colour of a page's first block from the drawing."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def serving(engine: ScriptedEngine, port: int, **options) -> Iterator[str]:
    app = FastAPI()
    stopping = threading.Event()
    app.include_router(memory_routes(engine, stopping=stopping.is_set, **options))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}/memory"
    finally:
        stopping.set()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser():
    playwright, path = wanted.module("playwright.sync_api"), wanted.program("chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def page_of(browser, url: str, **options) -> Iterator:
    """A page that raised nothing and asked no other host for anything, by the end."""
    page = browser.new_page(viewport={"width": 1180, "height": 800}, **options)
    errors, hosts = [], set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(url)
    yield page
    page.close()
    assert errors == [] and hosts == {url.split("/")[2]}


def live(page) -> None:
    page.wait_for_selector("#status[data-state=live]", timeout=10_000)


def table(page, selector: str) -> list[list[str]]:
    rows = page.locator(f"{selector} tbody tr")
    return [rows.nth(i).locator("th, td").all_inner_texts() for i in range(rows.count())]


def counted(seen: MemoryMap) -> list[list[str]]:
    return [
        [
            g.name,
            *(
                f"{n:,}"
                for n in (int((seen.page_groups == i).sum()), g.used, g.shared, g.used_tokens, g.cached, g.empty)
            ),
        ]
        for i, g in enumerate(seen.groups)
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_every_page_in_the_colour_of_its_group_and_the_shade_of_its_state(browser, scheme):
    engine = busy_engine()
    seen = engine.manager.map()
    with serving(engine, free_port()) as url, page_of(browser, url, color_scheme=scheme) as page:
        live(page)
        assert table(page, "#groups") == counted(seen)
        expected = {"full": (0, 114, 178), "window": (230, 159, 0), None: None}
        alphas = {1: 0.14, 2: 0.4, 3: 0.72, 4: 1}
        states = set()
        for number in range(seen.num_pages):
            *rgb, alpha = page.evaluate(PIXEL, number)
            group = int(seen.page_groups[number])
            if group < 0:
                assert alpha == pytest.approx(255 * 0.16, abs=2)
                continue
            state = seen.page(number)[0].state
            states.add(state)
            assert alpha == pytest.approx(255 * alphas[state], abs=2), f"page {number} is {state.name}"
            own = {"light": (48, 54, 61), "dark": (240, 243, 247)}[scheme]  # of shared blocks
            assert rgb == pytest.approx(own if state == 4 else expected[seen.groups[group].name], abs=6)
        assert len(states) >= 3
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 20, 24)"}[scheme]


def test_it_follows_the_engine_and_tells_owners_tokens_and_last_need(browser):
    engine = busy_engine()
    with serving(engine, free_port()) as url, page_of(browser, url) as page:
        live(page)
        engine.end(5)
        engine.step()
        seen = engine.manager.map()
        page.wait_for_function(
            "expected => document.querySelector('#groups tbody').innerText.includes(expected)",
            arg=f"{seen.groups[0].used_tokens:,}",
            timeout=5000,
        )
        assert table(page, "#groups") == counted(seen)
        box = page.locator("#map").bounding_box()
        page.mouse.move(box["x"] + 8, box["y"] + 8)
        first = seen.page(0)
        tip = page.inner_text("#tip")
        assert tip.splitlines()[0] == "Page 0, full: 2 shared"
        assert "request alice-1, sequence 0" in tip and f"up to {first[0].owners} owners" in tip
        cached = next(n for n in range(seen.num_pages) if seen.page(n) and all(b.state == 2 for b in seen.page(n)))
        columns, side = (float(page.get_attribute("#map", f"data-{name}")) for name in ("columns", "side"))
        page.mouse.click(box["x"] + 4 + cached % columns * side, box["y"] + 4 + cached // columns * side)
        assert page.inner_text("#page-title").startswith(f"Page {cached}:")
        assert "cached" in page.inner_text("#page") and "s ago" in page.inner_text("#page")
        assert page.inner_text("#page-owner") == "No sequence owns a block of it."
        for by, least in (("request", BlockState.USED), ("prefix", BlockState.CACHED)):
            page.check(f"input[value={by}]")
            colours: dict[int, set[tuple[int, ...]]] = {}
            for number in range(seen.num_pages):
                block = seen.page(number)[0] if seen.page(number) else None
                if block is not None and block.state >= least:
                    rgb = page.evaluate(PIXEL, number)[:3]
                    colours.setdefault(getattr(block, by), set()).add(tuple(round(c / 32) for c in rgb))
            assert len(colours) >= 2 and not set.intersection(*colours.values()), by


def test_the_keyboard_reaches_every_page_and_a_screen_reader_hears_it(browser):
    engine = busy_engine()
    seen = engine.manager.map()
    with serving(engine, free_port()) as url, page_of(browser, url) as page:
        live(page)
        for _ in range(6):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "map":
                break
        columns = int(page.get_attribute("#map", "data-columns"))
        for key, number in (("ArrowRight", 1), ("ArrowDown", 1 + columns), ("Home", 0), ("End", seen.num_pages - 1)):
            page.keyboard.press(key)
            assert page.inner_text("#said").startswith(f"Page {number}"), key
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert page.inner_text("#page-title") == "Page 0: full"
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        page.click("summary")
        page.wait_for_selector("#pages tr")
        rows = table(page, "#table")
        assert len(rows) == 25 and rows[0][:3] == ["0", "full", "2"] and rows[0][-1] == "alice-1"
        page.click("#forth")
        assert table(page, "#table")[0][0] == "25"
        for canvas in page.locator("canvas").all():
            assert canvas.get_attribute("aria-label")


def test_it_survives_a_restart_of_the_server(browser):
    port, before, after = free_port(), busy_engine(), ScriptedEngine(64)
    after.begin(0, [1] * 160, "again")
    with serving(before, port) as url:
        page_manager = page_of(browser, url)
        page = page_manager.__enter__()
        live(page)
        assert table(page, "#groups") == counted(before.manager.map())
    page.wait_for_selector("#status[data-state=lost]", timeout=10_000)
    with serving(after, port):
        page.wait_for_selector("body[data-connections='2']", timeout=15_000)
        live(page)
        assert table(page, "#groups") == counted(after.manager.map())
        page_manager.__exit__(None, None, None)


def test_a_key_is_asked_for_where_the_stream_is_guarded(browser):
    def admin(authorization: str = Header("")) -> None:
        if authorization != "Bearer secret":
            raise HTTPException(401)

    with serving(busy_engine(), free_port(), dependencies=[Depends(admin)]) as url, page_of(browser, url) as page:
        page.wait_for_selector("#key:not([hidden])")
        assert page.inner_text("#status") == "an admin key is needed"
        for secret, state in (("wrong", "key"), ("secret", "live")):
            page.fill("#secret", secret)
            page.click("#key button")
            page.wait_for_selector(f"#status[data-state={state}]")
        assert page.locator("#key").is_hidden()


def test_a_pool_of_a_hundred_thousand_blocks_is_drawn_and_followed(browser):
    engine = busy_engine(50_000)
    with serving(engine, free_port()) as url, page_of(browser, url) as page:
        live(page)
        engine.step()
        shown = f"{engine.manager.map().groups[0].used_tokens:,}"
        page.wait_for_function(
            "t => document.querySelector('#groups tbody').innerText.includes(t)", arg=shown, timeout=10_000
        )


def items(page, selector: str) -> list[str]:
    return page.locator(f"{selector} li").all_inner_texts()


def test_the_legend_follows_what_colours_mean_and_the_title_is_the_models(browser):
    engine = busy_engine()
    with serving(engine, free_port(), model="Qwen/größe") as url, page_of(browser, url) as page:
        live(page)
        assert page.inner_text("#model") == "Qwen/größe" and page.title() == "Qwen/größe - jpaged memory"
        assert items(page, "#hues") == ["full", "window", "shared by several sequences"]
        page.check("input[value=request]")
        of_requests = items(page, "#hues")
        assert any(text.startswith("request alice-") for text in of_requests)
        assert of_requests[-2:] == ["of no running request", "shared by several sequences"]
        page.check("input[value=prefix]")
        assert items(page, "#hues")[-1] == "of no whole prefix" and items(page, "#hues")[0].startswith("prefix ")


def test_pages_with_blocks_alone_are_drawn_larger(browser):
    engine = busy_engine()
    with serving(engine, free_port()) as url, page_of(browser, url) as page:
        live(page)
        before = float(page.get_attribute("#map", "data-side"))
        page.check("#used")
        held = [n for n, group in enumerate(engine.manager.map().page_groups) if group >= 0]
        side, columns = (float(page.get_attribute("#map", f"data-{name}")) for name in ("side", "columns"))
        assert side > before
        box, last = page.locator("#map").bounding_box(), len(held) - 1
        page.mouse.click(box["x"] + 5 + last % columns * side, box["y"] + 5 + last // columns * side)
        assert page.inner_text("#page-title").startswith(f"Page {held[-1]}:")
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert page.inner_text("#page-title").startswith(f"Page {held[0]}:")


def test_a_narrow_screen_scrolls_tables_alone_and_its_cells_can_be_tapped(browser):
    engine = busy_engine()
    with serving(engine, free_port()) as url, page_of(browser, url, has_touch=True) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        page.reload()
        live(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelector('#groups').scrollWidth") > 340
        side = float(page.get_attribute("#map", "data-side"))
        assert side >= 24
        box = page.locator("#map").bounding_box()
        page.touchscreen.tap(box["x"] + side / 2, box["y"] + side / 2)
        assert page.inner_text("#page-title").startswith("Page 0:") and page.is_visible("#tip")


LEFT_COLUMNS = """() => [...document.querySelectorAll("#plots canvas")].map((canvas) =>
  [...canvas.getContext("2d").getImageData(0, 0, 1, canvas.height).data].some((value) => value))"""
"""Tells of each plot whether anything is painted at its left edge, where a label that does not fit would be cut."""


@pytest.mark.parametrize("rate", [30, 30_000, 3_000_000])
def test_the_numbers_of_an_axis_fit_whatever_they_are(browser, rate):
    engine = busy_engine()
    with serving(engine, free_port()) as url, page_of(browser, url) as page:
        live(page)
        for _ in range(4):
            engine.step(seconds=rate / 1000)
            engine.output_tokens += rate
            engine.prompt_tokens += rate
            page.wait_for_timeout(300)
        shown = page.inner_text("#plots")
        assert re.search(rf"\b\d{{{len(str(rate))},}}(\.\d)? /s output", shown), shown
        assert page.evaluate(LEFT_COLUMNS) == [False] * 5


EDGES = """div => [div.scrollLeft, div.scrollWidth - div.clientWidth - div.scrollLeft]"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_scrolls_has_a_shadow_where_more_of_it_is(browser, scheme):
    image = pytest.importorskip("PIL.Image")
    engine = busy_engine()
    with serving(engine, free_port()) as url, page_of(browser, url, color_scheme=scheme) as page:
        live(page)
        tables = page.locator(".scroll").first

        def shadows() -> tuple[bool, bool]:
            """Tell whether the left and the right edge have another colour than the middle, between the rows."""
            shot = image.open(BytesIO(tables.screenshot(animations="disabled"))).convert("RGB")
            y = 2
            middle, left, right = (shot.getpixel((x, y)) for x in (shot.width // 2, 0, shot.width - 1))
            return left != middle, right != middle

        assert shadows() == (False, False), "all of it is there on a wide screen"
        page.set_viewport_size({"width": 390, "height": 800})
        assert tables.evaluate(EDGES)[1] > 0 and shadows() == (False, True)
        tables.evaluate("div => { div.scrollLeft = 20 }")
        assert shadows() == (True, True)
        tables.evaluate("div => { div.scrollLeft = div.scrollWidth }")
        assert shadows() == (True, False)
