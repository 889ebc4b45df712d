"""The page at `/`, in headless Chromium, against a stub of the API that answers in the server's format.

The tests are skipped with a reason if Chromium, its driver or selenium is not installed. With PAGE_SHOTS=DIR they write a
PNG screenshot of each view in light and dark mode to DIR.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from scripts.corpus.train_tiny import EXAMPLES
from server.replies import Health
from tests.support.page_stub import KEY, STATS, STORY, STORY_TOKENS, StubServer, is_drafted

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is tested with selenium (PyPI), which is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="the page is tested in Chromium; install chromium and chromium-driver"
)

SHOTS = os.environ.get("PAGE_SHOTS")
OFFERED = "return [...document.querySelectorAll('#examples button')].map((b) => b.textContent)"


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    server = StubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--lang=en",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


class Page:
    def __init__(self, driver: Any, stub: StubServer) -> None:
        self.driver = driver
        self.stub = stub
        self.may_log_refusals = False  # Chromium itself logs each response with an error status

    def open(self, view: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.stub.url + view)
        self.wait(lambda: self.id("health").text == self.stub.stats["status"])

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def text(self, selector: str) -> str:
        """The element's text in the DOM, which CSS does not change."""
        return self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def send(self, prompt: str, key: str = Keys.ENTER) -> None:
        self.id("prompt").send_keys(prompt)
        self.id("prompt").send_keys(key)

    def choose(self, mode: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, f"[name=mode][value={mode}]").click()

    def idle(self) -> None:
        self.wait(lambda: self.id("send").is_displayed())

    def set(self, name: str, value: str) -> None:
        field = self.driver.find_element(By.CSS_SELECTOR, f"#sampling [name={name}]")
        field.clear()
        field.send_keys(value)

    def shot(self, name: str) -> None:
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


@pytest.fixture
def page(chromium: Any, stub: StubServer) -> Iterator[Page]:
    stub.requests.clear()
    stub.gone.clear()
    stub.stats = dict(STATS)
    stub.needs_key = False
    chromium.set_window_size(1280, 860)
    chromium.get(stub.url)
    chromium.execute_script("sessionStorage.clear()")
    for log in ("browser", "performance"):
        chromium.get_log(log)
    page = Page(chromium, stub)
    page.open()
    yield page
    for entry in chromium.get_log("browser"):
        refusal = entry["source"] == "network" and "responded with a status of 4" in entry["message"]
        assert page.may_log_refusals and refusal, entry
    for entry in chromium.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            target = message["params"].get("request", message["params"])["url"]
            assert target.startswith((stub.url, "data:", "about:", "chrome://")), f"a request left the host: {target}"


def test_reasoning_is_folded(page: Page) -> None:
    page.send("think")
    page.idle()
    assert page.text(".assistant .text") == "75" and page.text(".assistant details") == "ReasoningHm, so."
    (box,) = page.all(".assistant details")
    assert box.get_attribute("open") is None
    page.all(".assistant summary")[0].click()
    assert box.get_attribute("open")


def test_chat_streams_with_probabilities(page: Page) -> None:
    page.id("system").send_keys("You tell stories.")
    page.send("Tell me a story")
    page.wait(lambda: 0 < len(page.text(".assistant .text")) < len(STORY) or not page.id("stop").is_displayed())
    page.idle()
    assert page.text(".user .text") == "Tell me a story"
    assert page.text(".assistant .text") == STORY
    path, body = page.stub.requests[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "tiny-hybrid",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "max_tokens": 256,
        "logprobs": True,
        "top_logprobs": 5,
        "return_drafted": True,
        "messages": [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Tell me a story"}],
    }

    tokens = page.all(".assistant .token")
    assert [page.driver.execute_script("return arguments[0].textContent", t) for t in tokens] == STORY_TOKENS
    tints = {t.value_of_css_property("background-color") for t in tokens[:5]}
    assert len(tints) == 5, "five probabilities, five tints"
    lines = [t.value_of_css_property("box-shadow") for t in tokens]
    assert [line != "none" for line in lines] == [is_drafted(i) for i in range(len(tokens))]
    assert page.id("legend-drafted").is_displayed()
    assert not page.id("tip").is_displayed()
    ActionChains(page.driver).move_to_element(tokens[3]).perform()
    page.wait(lambda: page.id("tip").is_displayed())
    tip = page.id("tip").text
    assert "␣time," in tip and "8.0%" in tip and "drafted" not in tip, tip
    assert "␣cat" in tip and "46.0%" in tip and "⏎" in tip and "␣<b>" in tip and "< 0.01%" in tip, tip
    page.shot("hover")
    ActionChains(page.driver).move_to_element(page.id("send")).perform()
    page.wait(lambda: not page.id("tip").is_displayed())

    facts = page.id("facts").text
    assert f"Tokens\n{len(STORY_TOKENS)}" in facts and "Prompt\n11" in facts and "Ended by\nstop" in facts, facts
    assert float(page.id("fact-rate").text) > 0
    assert "ms" in page.id("fact-ttft").text

    # The second request contains the first turn.
    page.send("Another")
    page.wait(lambda: len(page.stub.requests) == 2)
    page.idle()
    roles = [(m["role"], m["content"]) for m in page.stub.requests[1][1]["messages"]]
    assert roles == [("system", "You tell stories."), ("user", "Tell me a story"), ("assistant", STORY), ("user", "Another")]
    page.id("again").click()
    page.wait(lambda: len(page.stub.requests) == 3)
    page.idle()
    assert page.stub.requests[2][1]["messages"] == page.stub.requests[1][1]["messages"]
    assert len(page.all(".message")) == 4
    page.id("clear").click()
    assert page.all(".message") == []


def test_keyboard_walks_tokens(page: Page) -> None:
    page.send("Tell me a story")
    page.wait(lambda: page.all(".token"))
    page.idle()
    assert len(page.all(".token[tabindex='0']")) == 1, "one tab stop an answer"
    page.driver.execute_script("document.querySelector('.token').focus()")
    page.wait(lambda: "Once" in page.id("tip").text)
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    page.wait(lambda: "␣upon" in page.id("tip").text and "42.0%" in page.id("tip").text)
    assert page.driver.switch_to.active_element.get_attribute("aria-describedby") == "tip"
    page.driver.switch_to.active_element.send_keys(Keys.END)
    page.wait(lambda: "␣end." in page.id("tip").text)
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.id("tip").is_displayed())


def test_completion_and_sampling_controls(page: Page) -> None:
    page.choose("completion")
    values = {
        "temperature": "0",
        "max_tokens": "40",
        "top_p": "0.9",
        "top_k": "50",
        "min_p": "0.05",
        "seed": "7",
        "presence_penalty": "-0.5",
        "frequency_penalty": "0.25",
        "repetition_penalty": "1.1",
    }
    for name, value in values.items():
        page.set(name, value)
    page.id("stops").send_keys("END\n\\n\\n")
    page.send("Once upon", Keys.CONTROL + Keys.ENTER)
    page.wait(lambda: page.text(".completion .text") == "Once upon" + STORY)
    page.idle()
    path, body = page.stub.requests[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "tiny-hybrid",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "Once upon",
        "logprobs": 5,
        "return_drafted": True,
        "stop": ["END", "\n\n"],
        **{name: json.loads(value) for name, value in values.items()},
    }
    token = page.all(".completion .token")[1]
    ActionChains(page.driver).move_to_element(token).perform()
    page.wait(lambda: "␣upon 42.0%" in page.id("tip").text)

    # Without the probabilities view, logprobs are not requested. An emptied field is not sent.
    page.id("probabilities").click()
    page.driver.find_element(By.CSS_SELECTOR, "[name=temperature]").clear()
    page.id("again").click()
    page.wait(lambda: len(page.stub.requests) == 2)
    page.idle()
    assert not {"logprobs", "temperature"} & page.stub.requests[1][1].keys()

    # Settings survive a reload, and a reset restores the defaults.
    page.open()
    assert page.driver.find_element(By.NAME, "seed").get_attribute("value") == "7"
    page.id("defaults").click()
    assert page.driver.find_element(By.NAME, "temperature").get_attribute("value") == "0.7"
    assert page.driver.find_element(By.NAME, "seed").get_attribute("value") == ""


def test_a_value_out_of_range_is_not_sent(page: Page) -> None:
    page.set("top_p", "3")
    page.send("Hello")
    time.sleep(0.3)
    assert page.stub.requests == []
    assert page.driver.switch_to.active_element.get_attribute("name") == "top_p"


def test_tokens_and_text_that_do_not_arrive_together(page: Page) -> None:
    page.send("bytes")
    page.wait(lambda: page.text(".assistant .text") == "Café au lait")
    page.idle()
    spans = page.driver.execute_script("return [...document.querySelectorAll('.token')].map((t) => t.textContent)")
    assert spans == ["Caf", "é", " au", " l", "ait"]


def test_stop_aborts(page: Page) -> None:
    page.send("for ever")
    page.wait(lambda: len(page.all(".token")) > 20)
    page.id("stop").click()
    page.idle()
    assert page.stub.gone.wait(120), "the server was not told"
    text = page.text(".assistant .text")
    assert text.startswith("Once upon a time")
    assert page.id("fact-finish").text == "you"
    time.sleep(0.3)
    assert page.text(".assistant .text") == text
    assert not page.id("banner").is_displayed()

    page.stub.gone.clear()
    page.send("for ever")
    page.wait(lambda: len(page.all(".message")) == 4 and page.all(".message:last-child .token"))
    page.id("prompt").send_keys(Keys.ESCAPE)
    page.idle()
    assert page.stub.gone.wait(120)


def test_errors_are_readable(page: Page) -> None:
    page.may_log_refusals = True
    page.send("too long")
    page.wait(lambda: page.id("banner").is_displayed())
    assert page.id("banner-text").text == "This prompt has 5000 tokens; the context holds 1024. (messages)"
    assert page.all(".message") == []
    assert page.id("prompt").get_attribute("value") == "too long", "the question comes back"
    page.id("prompt").clear()
    page.send("busy")
    page.wait(lambda: page.id("banner-text").text == "The queue is full. Try again in 3 s.")
    page.id("prompt").clear()
    page.send("break")
    page.wait(lambda: page.id("banner-text").text == "A rank died.")
    assert page.text(".assistant .text") == "Half an", "what had come stays"
    page.shot("error")
    page.id("banner-close").click()
    assert not page.id("banner").is_displayed()


def test_api_key(page: Page) -> None:
    page.may_log_refusals = True
    page.stub.needs_key = True
    page.driver.get("about:blank")
    page.driver.get(page.stub.url)
    page.wait(lambda: page.id("banner-text").text.startswith("Incorrect API key provided."))
    assert "“API key” at the top" in page.id("banner-text").text
    assert "API key" in page.driver.find_element(By.CSS_SELECTOR, "label:has(#key)").text
    assert page.driver.switch_to.active_element.get_attribute("id") == "key"
    page.id("key").send_keys(KEY + Keys.ENTER)
    page.wait(lambda: not page.id("banner").is_displayed())
    assert [o.text for o in page.all("#model option")] == ["tiny-hybrid", "other"]
    page.open()
    assert page.id("key").get_attribute("value") == KEY, "kept for this tab"
    assert page.driver.execute_script("return JSON.stringify(localStorage)") == "{}"


def test_it_says_what_the_model_is_and_offers_what_it_can_answer(page: Page) -> None:
    page.wait(lambda: page.all("#examples button"))
    assert page.id("about").text == (
        f"tiny-hybrid: {EXAMPLES['about']}. Hybrid ladder (layers 4-7 of 8), context of 1,024 tokens."
    )
    assert page.driver.execute_script(OFFERED) == EXAMPLES["chat"]
    page.choose("completion")
    assert page.driver.execute_script(OFFERED) == EXAMPLES["completion"]
    page.choose("chat")
    page.all("#examples button")[3].click()
    page.wait(lambda: page.stub.requests)
    assert page.stub.requests[0][1]["messages"] == [{"role": "user", "content": EXAMPLES["chat"][3]}]
    page.idle()
    assert not page.id("about").is_displayed()
    page.id("clear").click()

    page.driver.execute_script(
        "arguments[0].value = 'other'; arguments[0].dispatchEvent(new Event('change'))", page.id("model")
    )
    assert page.id("about").text == "other"
    neutral = page.driver.execute_script(OFFERED)
    assert neutral and not set(neutral) & set(EXAMPLES["chat"]), "nothing is known of it"


def test_a_phone_has_room(page: Page) -> None:
    metrics = {"width": 375, "height": 667, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open()
        box = "return arguments[0].getBoundingClientRect().toJSON()"
        assert page.driver.execute_script(box, page.all(".top")[0])["height"] < 120
        for name in ("model", "key", "health"):
            assert page.id(name).is_displayed()
        page.shot("phone")
        page.send("Tell me a story")
        page.wait(lambda: page.all(".token"))
        page.idle()
        tokens = page.all(".token")
        for token in (tokens[0], max(tokens, key=lambda t: t.rect["x"] + t.rect["width"]), tokens[-1]):
            ActionChains(page.driver).move_to_element(token).perform()
            page.wait(lambda: page.id("tip").is_displayed())
            tip = page.driver.execute_script(box, page.id("tip"))
            width, height = page.driver.execute_script(
                "const e = document.documentElement; return [e.clientWidth, e.clientHeight]"
            )
            assert tip["left"] >= 0 and tip["right"] <= width and tip["top"] >= 0 and tip["bottom"] <= height, tip
        page.shot("phone-tip")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_dashboard(page: Page) -> None:
    page.id("tab-dashboard").click()
    assert page.driver.current_url.endswith("#dashboard")
    page.wait(lambda: "tiny-hybrid" in page.id("identity").text)
    assert page.id("identity").text.split("\n") == [
        *("Model", "tiny-hybrid", "Variant", "hybrid ladder (last 4 of 8 layers)", "Communicator", "gloo", "Ranks", "2"),
        *("Device", "cpu", "Type", "float32", "Context", "1,024 tokens", "Up", "1 h 6 min"),
    ]
    assert page.id("tiles").text.split("\n") == [
        *("Generated tokens/s", "231", "Prompt tokens/s", "1,840", "Running", "3", "Waiting", "1"),
        *("KV cache", "25%", "128 of 512 blocks", "First token", "42.1 ms", "p95 87.4 ms"),
        *("Between tokens", "6.20 ms", "p95 –", "Step", "5.71 ms", "Prefix cache hits", "62%", "Preemptions", "7"),
    ]
    assert page.id("drafts").text.split("\n") == [
        *("Accepted of a draft: ngram", "–", "0 of 0 tokens", "Accepted of a draft: head", "3.09", "1,236 of 1,600 tokens")
    ]
    charts = [c.get_attribute("aria-label") for c in page.all("#charts svg")]
    assert len(charts) == 6
    assert "Generated tokens/s, last two minutes: generated 231" in charts
    assert "Requests, last two minutes: running 3, waiting 1" in charts

    page.stub.stats |= {"running": 12, "status": "draining", "accepted_length": 2.345}
    page.wait(lambda: "Running\n12\n" in page.id("tiles").text)
    assert "Generated tokens/s\n231\n2.3 accepted in each draft\n" in page.id("tiles").text
    assert page.id("health").text == "draining"
    page.wait(lambda: "L" in (page.all("#charts .line")[2].get_attribute("d") or ""))

    # If all statistics are null, the page shows dashes and no error.
    page.stub.stats = dict.fromkeys(STATS)
    page.wait(lambda: "Running\n–\n" in page.id("tiles").text)
    assert "NaN" not in page.driver.page_source and "undefined" not in page.id("dashboard").text

    # An arrow key switches back to the playground.
    page.id("tab-dashboard").send_keys(Keys.ARROW_LEFT)
    assert page.id("playground").is_displayed() and not page.id("dashboard").is_displayed()


@pytest.mark.parametrize("status", get_args(Health.model_fields["status"].annotation))
def test_only_a_broken_server_is_shown_as_broken(page: Page, status: str) -> None:
    page.stub.stats["status"] = status
    page.open()
    state = {"ready": "good", "broken": "bad"}.get(status, "wait")
    assert page.id("health").get_attribute("data-state") == state


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_fits_and_follows_the_colour_scheme(page: Page, width: int) -> None:
    metrics = {"width": width, "height": 860, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def channels() -> list[int]:
        colour = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        return [int(c) for c in colour.removeprefix("rgb(").removesuffix(")").split(",")]

    def check(view: str) -> None:
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            page.wait(lambda scheme=scheme: min(channels()) > 200 if scheme == "light" else max(channels()) < 60)
            page.shot(f"{view}-{scheme}-{width}")
            assert page.driver.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0

    try:
        page.open()
        page.send("Tell me a story")
        page.wait(lambda: page.all(".token"))
        page.idle()
        check("playground")
        page.id("tab-dashboard").click()
        if SHOTS:  # varying values, so that the screenshot shows curves
            for i in range(12):
                wave = 1 + math.sin(i / 2)
                page.stub.stats |= {
                    "generation_tokens_per_second": 180 + 60 * wave,
                    "running": 2 + round(3 * wave),
                    "kv_blocks_used": 100 + 20 * i,
                    "ttft_seconds": {"p50": 0.04 + 0.01 * wave, "p95": 0.09 + 0.02 * wave},
                }
                time.sleep(1)
        check("dashboard")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
