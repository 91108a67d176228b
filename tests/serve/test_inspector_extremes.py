"""The inspector's page at its limits: very long rows, no requests and hundreds of them, more blocks
than pixels, frames that were lost, both ends of time. In a headless Chromium."""

import itertools
import re
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from browsing import opened, picture, shows
from serving import Server, make_tokenizer, run_app, running
from transformers import LlamaConfig, LlamaForCausalLM

from blocktable import LLM
from blocktable.parallel.event_stream import EventSubscriber, Received
from blocktable.parallel.events import BlockRemoved, BlockStored, EventBatch
from blocktable.serve.attach import build_attached
from blocktable.serve.attached import AttachedSource, Follower
from blocktable.serve.config import ServerConfig

LONG = 9000
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server():
    with running(ServerConfig(port=0)) as made:
        yield made


def complete(server, prompt, tokens, **fields):
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


@pytest.fixture
def page(browser, server):
    made = opened(browser, server)
    yield made
    made.close()
    assert made.problems == []


def agrees(page, server):
    """Wait until the page's codes are the recorder's."""
    deadline = time.monotonic() + 15
    while (
        page.evaluate("Array.from(inspector.S.codes)") != server.app.state.recorder.codes.tolist()
    ):
        assert time.monotonic() < deadline, "the page shows another pool than there is"
        page.wait_for_timeout(100)


# --- very long rows ---


@pytest.fixture(scope="module")
def long_server():
    """Blocks of one token, and positions enough for a row of many thousands."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=20_000,
        eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    llm = LLM(
        LlamaForCausalLM(config).eval(), tokenizer=make_tokenizer(), block_size=1,
        num_blocks=30_000, max_num_seqs=4, dtype="float32",
    )  # fmt: skip
    made = Server(llm, ServerConfig(port=0)).start()
    yield made
    made.stop()


@pytest.fixture
def long_request(long_server):
    """Its number: of a request with a row of thousands, half of it hit, that goes on."""
    unique = f"{next(NUMBERS)}: "  # nothing of the test before is hit
    text = (unique + "".join(chr(97 + i % 26) for i in range(LONG)))[:LONG]
    complete(long_server, text[: LONG // 2], 1)
    stop = threading.Event()

    def ask():
        with httpx.stream(
            "POST", f"{long_server.url}/v1/completions", timeout=300,
            json={"prompt": text, "max_tokens": 10_000, "ignore_eos": True, "stream": True},
        ) as answer:  # fmt: skip
            for _ in answer.iter_raw():
                if stop.is_set():
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    recorder = long_server.app.state.recorder
    while not any(seen.row >= 0 and seen.prompt_tokens == LONG
                  for seen in list(recorder.requests.values())):  # fmt: skip
        time.sleep(0.02)
    yield max(recorder.requests)
    stop.set()
    thread.join()
    long_server.wait_idle()


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (1440, "light"), (360, "dark")])
def test_a_row_of_thousands_of_blocks(browser, long_server, long_request, width, scheme):
    page = opened(browser, long_server, width, 900, scheme)
    shows(page, "requests", f"{LONG} tokens")
    page.click(f"[data-request='{long_request}']")
    page.wait_for_selector(".rowmap")
    page.wait_for_function(f"inspector.S.shown.rows[0].length >= {LONG}")
    assert page.evaluate("document.querySelectorAll('#detail *').length") < 100
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shows(page, "detail", f"{LONG:,} tokens, {LONG // 2:,} hit")
    page.wait_for_timeout(1500)  # a second look, and several drawings
    picture(page, f"inspector-long-{scheme}-{width}")
    # the row is all there, in order, and each entry leads to its block
    page.click("#live")
    page.wait_for_timeout(600)  # a look that was under way
    row = page.evaluate("inspector.S.shown.rows[0]")
    table = long_server.llm.engine.manager.tables[0]
    (line,) = np.flatnonzero(table.counts)
    assert row == table.rows[line, : len(row)].tolist()
    for entry in (0, LONG // 2, len(row) - 1):
        place = page.evaluate(
            "i => { const d = document.querySelector('.rowmap').dataset, n = Number(d.columns);"
            "return [(i % n + 0.5) * d.cell, (Math.floor(i / n) + 0.5) * d.cell]; }", entry,
        )  # fmt: skip
        page.hover(".rowmap", position={"x": place[0], "y": place[1]})
        told = page.text_content(".entry")
        assert told.startswith(f"entry {entry:,}: block {row[entry]}, "), told
        assert ("hit, " in told) == (entry < LONG // 2)
    page.click(".rowmap", position={"x": place[0], "y": place[1]})
    shows(page, "detail", f"block {row[-1]}")
    shows(page, "detail", f"entry {len(row) - 1} of its row")
    page.close()
    assert page.problems == []


def test_a_row_that_is_looked_at_anew_does_not_flicker(browser, long_server, long_request):
    """Whenever its map is in the page it is drawn."""
    page = opened(browser, long_server)
    page.evaluate(f"inspector.showRequest({long_request})")
    page.wait_for_selector(".rowmap")
    seen, blank = page.evaluate("""() => new Promise((done) => {
        const maps = new Set();
        let blank = 0;
        const look = new MutationObserver(() => {
            const map = document.querySelector(".rowmap");
            if (map) { maps.add(map); blank += map.dataset.columns === undefined; }
        });
        look.observe(document.getElementById("detail"), { childList: true });
        setTimeout(() => { look.disconnect(); done([maps.size, blank]); }, 3500);
    })""")
    assert seen >= 2 and blank == 0
    page.close()


def test_a_long_row_grows_and_goes(browser, long_server, long_request):
    page = opened(browser, long_server)
    page.evaluate(f"inspector.showRequest({long_request})")
    page.wait_for_selector(".rowmap")
    before = page.evaluate("inspector.S.shown.rows[0].length")
    page.wait_for_function(f"inspector.S.shown.rows[0].length > {before}")
    call, _, _ = next(iter(long_server.bridge._calls.values()))
    long_server.app.state.bridge._loop.call_soon_threadsafe(call.hang_up)
    shows(page, "detail", "It holds no row any more.")
    assert page.query_selector(".rowmap") is None
    page.close()
    assert page.problems == []


# --- nothing, and too much ---


def test_a_page_without_requests(browser):
    with running(ServerConfig(port=0)) as idle:
        page = opened(browser, idle)
        shows(page, "requests", "No requests yet.")
        shows(page, "when", "nothing recorded yet")
        for button in ("#back", "#forward", "#live", "#use", "#time"):
            page.click(button)
        page.evaluate("inspector.moveTo(99)")
        page.click("[data-tab=tree]")
        shows(page, "tree", "Nothing is cached.")
        page.click("#map", position={"x": 3, "y": 3})
        shows(page, "detail", "Reserved")
        page.evaluate("inspector.showRequest(77)")
        shows(page, "detail", "no longer remembered")
        picture(page, "inspector-empty")
        page.close()
        assert page.problems == []


def test_hundreds_of_requests(page, server):
    for _ in range(3):
        complete(server, ["a few words"] * 50, 1)
    server.wait_idle()
    shows(page, "requests", "more")
    assert page.evaluate("document.querySelectorAll('.req').length") == 120
    picture(page, "inspector-hundreds")


def test_a_page_that_stays_open_forgets_requests(page):
    size, kept = page.evaluate("""() => {
        const S = inspector.S, c = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], last = S.sequence;
        S.requests.set(-5, { number: -5, id: "runs", row: 0, prompt: 1, cached: 0, from: 0 });
        for (let n = last + 1; n <= last + 9000; n++)
            inspector.add([{ n, s: n, t: n, d: 0.01, k: 1, b: [], c, e: [[-n, "stop"]],
                             a: [[-n, "req" + n, 0, 5, 0]] }]);
        return [S.requests.size, S.requests.has(-5)];
    }""")
    assert size < 5000 and kept
    assert page.evaluate("inspector.S.frames.length") <= 40_000


def settle(page):
    """Wait until the map keeps its place and size: a pause changes what stands above it, and the
    page lays it out anew when the browser says so."""
    page.evaluate("""async () => {
        for (let before = "", now; ; before = now) {
            await new Promise(done => setTimeout(done, 200));
            const r = document.getElementById("map").getBoundingClientRect(), S = inspector.S;
            now = [r.x, r.y, r.width, r.height, S.columns, S.cell, S.tall].join();
            if (now === before) return;
        }
    }""")


@pytest.mark.parametrize("count", [250_000, 1_000_000, 3_000_000])
def test_more_blocks_than_pixels(page, count):
    """The last block is in the picture, and under the pointer."""
    page.evaluate(f"""() => {{
        inspector.setLive(false);
        inspector.S.codes = new Int32Array({count}).map((_, i) => i % 3);
        inspector.layout();
    }}""")
    settle(page)
    box = page.evaluate("""() => { const r = document.getElementById("map").getBoundingClientRect();
        return [r.width, r.height]; }""")
    last = page.evaluate(f"""() => {{ const S = inspector.S, i = {count} - 1;
        return [(i % S.columns + 0.5) * S.cell / S.ratio,
                (Math.floor(i / S.columns) + 0.5) * S.tall / S.ratio]; }}""")
    assert 0 <= last[0] <= box[0] and 0 <= last[1] <= box[1]
    page.hover("#map", position={"x": last[0], "y": last[1]})
    block = int(page.text_content("#tip").split()[1].rstrip(":"))
    columns, tall = page.evaluate("[inspector.S.columns, inspector.S.tall]")
    assert count - columns * (2 / tall + 1) <= block < count  # the pointer is on a whole pixel


# --- what was lost ---


def test_the_page_over_events_tells_silence_and_gaps(browser):
    source = AttachedSource(2**20, endpoint="tcp://there:5557")
    silent = EventSubscriber("tcp://127.0.0.1:9")
    with run_app(build_attached(source, Follower(source, silent), "events")) as url:
        page = browser.new_page(viewport={"width": 1000, "height": 700})
        page.goto(f"{url}/inspect")
        shows(page, "status", "no events yet from tcp://there:5557")
        assert page.get_attribute("#status", "class") == "bad"
        blocks = BlockStored([1, 2, 3], None, list(range(12)), 4, None, "GPU", None)
        source.apply(Received(0, EventBatch(1.0, [blocks])))
        page.wait_for_function("document.getElementById('status').textContent === 'connected'")
        shows(page, "legend", "cached 3")
        # what events do not tell is not shown as if it were known
        shows(page, "numbers", "3 blocks cached")
        for element in ("numbers", "model", "usevalue"):
            assert not re.search(r"running|held|0 tokens", page.text_content(f"#{element}"))
        assert not page.is_visible("[data-tab=requests]") and page.is_visible("#use")
        assert not page.is_visible("#time")
        shows(page, "tree", "3 blocks")
        page.evaluate("inspector.showBlock(2)")
        shows(page, "detail", "this page's own")
        shows(page, "life", "stored")
        detail = page.text_content("#detail")
        assert "slots" not in detail and "block 1" in detail and "tokens 4 5 6 7" in detail
        source.apply(Received(1, EventBatch(1.0, [BlockRemoved([2], "GPU")])))
        shows(page, "life", "removed")
        source.apply(Received(9, EventBatch(2.0, [blocks]), missed=8))
        shows(page, "status", "8 batches of events were lost; all before is forgotten")
        picture(page, "inspector-gap")
        page.reload()
        shows(page, "status", "8 batches of events were lost")
        page.close()


def test_frames_that_were_missed_are_noticed_and_mended(page, server):
    complete(server, "before the gap", 4)
    agrees(page, server)
    page.evaluate("inspector.S.sequence -= 2; inspector.S.codes.fill(9);")
    complete(server, "after the gap", 4)
    agrees(page, server)
    page.evaluate("inspector.moveTo(0); inspector.moveTo(1e9)")
    agrees(page, server)


def test_a_paused_page_stays_where_it_was(page, server):
    while page.evaluate("inspector.S.frames.length") < 10:  # a frame may hold several steps
        complete(server, "some steps to look at", 12)
        page.wait_for_timeout(200)
    agrees(page, server)
    page.evaluate("inspector.setLive(false); inspector.moveTo(inspector.S.cursor - 5)")
    before = page.evaluate("[inspector.S.frames[inspector.S.cursor - 1].n, [...inspector.S.codes]]")
    page.evaluate("inspector.S.sequence -= 1")  # the next frame makes it read everything anew
    complete(server, "other steps meanwhile", 12)
    page.wait_for_function(f"inspector.S.sequence >= {server.app.state.recorder.sequence}")
    after = page.evaluate("[inspector.S.frames[inspector.S.cursor - 1].n, [...inspector.S.codes]]")
    assert after == before and not page.evaluate("inspector.S.live")
    page.reload()
    page.wait_for_function("document.getElementById('status').textContent === 'connected'")
    agrees(page, server)


def test_of_two_questions_the_last_is_answered(page):
    """Answers may come in another order."""
    page.evaluate("""() => {
        const real = window.fetch;
        let first = true;
        window.fetch = async (...a) => {
            const wait = first ? 600 : 0;
            first = false;
            await new Promise((done) => setTimeout(done, wait));
            return real(...a);
        };
        inspector.showBlock(7); inspector.showBlock(8);
    }""")
    page.wait_for_timeout(1200)
    assert page.text_content("#detail h3") == "block 8"


# --- the ends of time, and lives ---


def test_both_ends_of_time(page, server):
    complete(server, "to be scrubbed through", 20)
    agrees(page, server)
    shows(page, "usevalue", "cached")
    page.click("#live")
    page.evaluate("""() => { const s = document.getElementById("scrub");
        s.value = 0; s.dispatchEvent(new Event("input")); }""")
    shows(page, "when", "before the first recorded step")
    for element in ("numbers", "usevalue", "tokvalue", "hitvalue", "timevalue"):
        page.wait_for_function(f"document.getElementById('{element}').textContent === ''")
    page.click("#back")
    assert page.evaluate("inspector.S.cursor") == 0
    page.click("#forward")
    assert page.evaluate("inspector.S.cursor") == 1
    page.evaluate("""() => { const s = document.getElementById("scrub");
        s.value = s.max; s.dispatchEvent(new Event("input")); }""")
    agrees(page, server)
    shows(page, "usevalue", "cached")


def test_the_timelines_follow_the_cursor(page):
    """Where more steps were recorded than a timeline shows."""
    page.evaluate("""() => {
        const S = inspector.S, last = S.sequence, c = [1, 9, 0, 0, 1, 0, 1, 1, 0, 0];
        const frames = [];
        for (let n = last + 1; n <= last + 5000; n++)
            frames.push({ n, s: n, t: n, d: 0.01, k: 1, b: [], c, a: [], e: [] });
        inspector.add(frames);
        inspector.setLive(false);
    }""")
    for cursor in (4000, 3999, 100, 1, 4999):
        page.evaluate(f"inspector.moveTo({cursor})")
        page.wait_for_timeout(500)
        first, count = page.evaluate("""() => { const d = document.getElementById("use").dataset;
            return [Number(d.first), Number(d.count)]; }""")
        assert count == 1200 and first < cursor <= first + count


def test_a_freed_block_tells_who_had_it(page, server):
    complete(server, "a prompt whose last block is not full", 2)
    agrees(page, server)
    recorder = server.app.state.recorder
    freed = np.flatnonzero((recorder.codes & 7 == 0) & (recorder.place >= 0))
    page.evaluate(f"inspector.showBlock({int(freed[-1])})")
    shows(page, "detail", "last held by")
    shows(page, "life", "released")
    never = np.flatnonzero(recorder.place < 0)
    page.evaluate(f"inspector.showBlock({int(never[-1])})")
    shows(page, "life", "nothing in the recorded time")
    assert "held by" not in page.text_content("#detail")


def test_a_block_that_many_share(page, server):
    shared = "the very same beginning of all of them, twice over"
    complete(server, shared, 1)
    threads = [
        threading.Thread(target=complete, args=(server, f"{shared} {i}", 400)) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    page.wait_for_function("inspector.S.codes.some(c => (c & 7) === 4 && ((c >> 3) & 255) === 6)")
    block = page.evaluate("inspector.S.codes.findIndex(c => ((c >> 3) & 255) === 6)")
    page.evaluate(f"inspector.showBlock({block})")
    shows(page, "detail", "shared by 6 rows")
    shows(page, "life", "shared, now by")
    picture(page, "inspector-shared")
    for thread in threads:
        thread.join()
    shows(page, "detail", "cached, free to take")  # it is live: the block's life went on
