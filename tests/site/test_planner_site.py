"""The planner's page in a real Chromium: when it fetches, what it answers, how it is used."""
import json
import random
from urllib.parse import urlencode

import pytest
import site_checks as checks
from site_checks import ROOT
from test_site import PHONE, clean

import planner_files
from companion import planner_page

PAGE = "planner.html"
LONG = 60_000  # ms for the first answer on a busy machine
HEAVY = ("_static/pyodide", "_static/companion", "_static/planner_worker")
pytestmark = pytest.mark.browser


def heavy(sent):
    """What of these requests belongs to Python."""
    return [path for path, _ in sent if path.startswith(HEAVY)]


def button(page):
    return page.get_by_role("button", name="Plan", exact=True)


def answer(page):
    return page.get_by_role("region", name="Answer")


def alert(page):
    return page.locator("form.planner [role=alert]")


def quiet(page):
    """Wait until nothing is being planned."""
    page.wait_for_function("""() => {
        const text = document.querySelector("form.planner [role=status]").textContent;
        return !text.endsWith("…");
    }""", timeout=LONG)


def planned(page):
    """Press the button; wait for an answer or a mistake, and for the advice."""
    button(page).click()
    page.wait_for_function("""() => document.querySelector(
        "form.planner [role=status]").textContent || document.querySelector(
        "form.planner [role=alert]").textContent""", timeout=LONG)
    quiet(page)


def filled(page):
    """{name: value} of every input."""
    return page.evaluate("""() => Object.fromEntries(
        [...document.querySelector("form.planner").elements].filter(e => e.name)
        .map(e => [e.name, e.type === "checkbox" ? e.checked : e.value]))""")


def ask(page, call, queries):
    """The texts that the page's Python returns."""
    return page.evaluate("""async ([call, queries]) => {
        const { ask } = await import(document.querySelector("script[src*='planner.mjs']").src);
        return Promise.all(queries.map((q) => ask(call, q)));
    }""", [call, queries])


def open_all(page):
    page.evaluate("() => document.querySelectorAll('article details').forEach(d => d.open = true)")


WATCH = """() => {
    window.seen = [], window.said = [];
    const bar = document.querySelector("form.planner progress");
    const line = document.querySelector("form.planner [role=status]");
    new MutationObserver(() => bar.hidden || window.seen.push(bar.value))
        .observe(bar, { attributes: true });
    new MutationObserver(() => window.said.push(line.textContent))
        .observe(line, { childList: true });
}"""


def fetched_early(v):
    """What is fetched of Python while a reader looks at the page and changes its form."""
    v.page.get_by_label("Sequences at a time").fill("2")
    v.page.get_by_label("Method").select_option("lora")
    v.page.wait_for_timeout(800)  # longer than the page waits after a change
    return heavy(v.server.sent[v.start:])


@pytest.fixture(scope="module")
def started(visit, server):
    """A page that was changed, then planned: what it fetched before and after, what it said."""
    start = len(server.sent)
    server.slow["_static/pyodide/pyodide.asm.wasm"] = 0.3
    with visit(PAGE) as v:
        v.start = start
        v.page.evaluate(WATCH)
        v.before = fetched_early(v)
        planned(v.page)
        v.first = heavy(server.sent[start:])
        v.said, v.seen = v.page.evaluate("() => [window.said, window.seen]")
        v.text = answer(v.page).inner_text()
        server.slow.clear()
        yield v


@pytest.fixture
def fresh(started):
    """The same page with the form as at first."""
    page = started.page
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate("""() => {
        document.querySelector("form.planner").reset();
        document.querySelectorAll("article details").forEach(d => d.open = false);
    }""")
    page.locator("#plan-batch").dispatch_event("input")
    planned(page)
    return page


# --- fetching ----------------------------------------------------------------------------------

def test_nothing_is_fetched_before_the_first_use(started):
    assert started.before == []
    assert "_static/pyodide/pyodide.asm.wasm" in started.first
    assert len(started.first) == len(set(started.first))
    assert "lora" in started.text and "2 x 2048 tokens" in started.text
    clean(checks.loading(started))


def test_later_answers_fetch_nothing(fresh, server):
    before = len(server.sent)
    fresh.get_by_label("Sequences at a time").fill("3")  # planned anew without the button
    fresh.wait_for_function("() => document.querySelector('.answer').innerText.includes('3 x')")
    quiet(fresh)
    assert heavy(server.sent[before:]) == []


def test_progress_is_shown_while_it_fetches(started):
    assert started.said[:2] == ["Fetching Python…", "Starting Python…"]
    assert any(0.3 < value < 1 for value in started.seen)
    assert max(started.seen) < 1 and started.seen == sorted(started.seen)


def test_the_page_says_how_much_it_fetches():
    text = (ROOT / "planner.md").read_text(encoding="utf-8")
    assert f"some {planner_files.megabytes():.0f} MB" in text


def test_the_site_holds_the_files_of_the_package(site):
    for name in planner_files.names(ROOT):
        assert (site / planner_files.PLACE / name).read_bytes() == (
            ROOT / "companion" / name).read_bytes(), f"{name}: run `make book`"
    shipped = {str(p.relative_to(site / planner_files.PLACE))
               for p in (site / planner_files.PLACE).rglob("*") if p.is_file()}
    assert shipped == set(planner_files.names(ROOT))


def test_what_cannot_be_fetched_is_named_and_tried_again(visit, server, monkeypatch):
    body = server.body
    with visit(PAGE) as v:
        with monkeypatch.context() as broken:
            broken.setattr(server, "body", lambda path: (None, "text/plain")
                           if path.endswith("models.csv") else body(path))
            planned(v.page)
            assert "models.csv could not be fetched" in alert(v.page).inner_text()
        planned(v.page)
        assert alert(v.page).inner_text() == "" and "24GiB" in answer(v.page).inner_text()


def test_without_script_the_examples_are_there(visit, server):
    before = len(server.sent)
    with visit(PAGE, java_script_enabled=False) as v:
        assert not v.page.locator("form.planner").is_visible()
        assert v.page.get_by_text("The form needs JavaScript").is_visible()
        rows = v.page.locator("#worked-examples table.plan").first.locator("tbody tr")
        assert rows.count() == len(planner_page.EXAMPLES)
        example = v.page.locator("details.example").first
        assert not example.locator("table").first.is_visible()
        example.locator("summary").click()
        assert "does not fit" in example.inner_text() and "the peak" in example.inner_text()
        assert heavy(server.sent[before:]) == []


# --- the same answers --------------------------------------------------------------------------

CONFIGS = [
    {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "vocab_size": 5000,
     "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3},
    {"model_type": "gemma2", "hidden_size": 192, "intermediate_size": 640, "vocab_size": 9001,
     "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
     "sliding_window": 64},
    {"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 352, "vocab_size": 1000,
     "num_attention_heads": 4, "num_hidden_layers": 2, "num_local_experts": 4,
     "num_experts_per_tok": 2},
    {"model_type": "gpt_neox", "hidden_size": 128, "intermediate_size": 512, "vocab_size": 777,
     "num_attention_heads": 4, "num_hidden_layers": 2},
    {"model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 3000,
     "num_attention_heads": 4, "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
     "qk_rope_head_dim": 8, "v_head_dim": 16},
    {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3},  # lacks fields
]
MODELS = ["GPT-2 small", "gpt2small", "Pythia-160m", "3M", "3.5M", "9M", "12M",
          "Llma-2-7B"]


def random_query(rng):
    """A set-up with a few options away from their defaults, some of them contradictory."""
    method = rng.choice(["full", "lora", "qlora", "inference"])
    given = {"method": method, "gpu": rng.choice(["", "", "", "1GiB", "2GB", "t4", "h100", "24"]),
             "sequence": str(rng.choice([1, 17, 128, 333, 1024])), "batch": str(rng.randint(1, 9))}
    if rng.random() < 0.5:
        given["config"] = json.dumps(rng.choice(CONFIGS))
    else:
        given["model"] = rng.choice(MODELS)
    more = {"attention": ["eager", "sdpa", "flash"], "gpus": ["2", "4"], "tensor": ["2"],
            "recipe": [*planner_page.RECIPES]}
    training = {"optimizer": [*planner_page.OPTIMIZERS], "checkpointing": ["1"],
                "accumulate": ["2", "3"], "loss": ["narrow", "fused", "chunked"], "kernels": ["fused"],
                "shard": ["1", "2", "3"], "offload": ["optimizer", "parameters"],
                "rank": ["1", "64"], "targets": ["qv", "all"], "adapters": ["bf16"],
                "upcast": ["1"], "in_backward": ["1"], "varied": ["1"], "dropout": ["0.05"],
                "packing": ["1"],
                "single_quant": ["1"], "hold_inputs": ["1"], "flat": ["1"], "no_sync": ["1"],
                "tensor_only": ["1"]}
    inference = {"new_tokens": ["1", "100"], "weight_bits": ["4", "8", "3.5"], "paged": ["1"],
                 "kv_bits": ["8.5", "4"], "share": ["0.5"], "all_logits": ["1"]}
    more |= inference if method == "inference" else training
    for name in rng.sample([*more], rng.randint(0, 4)):
        given[name] = rng.choice(more[name])
    if given.keys() & {"tensor", "shard"} and rng.random() < 0.9:
        given["gpus"] = "4"
    return urlencode(given)


QUERIES = [random_query(random.Random(seed)) for seed in range(330)]


def test_hundreds_of_set_ups_are_answered_byte_for_byte(started):
    here = [planner_page.as_json(q) for q in QUERIES]
    kinds = [next(iter(json.loads(text))) for text in here]
    assert kinds.count("error") > 10 and kinds.count("model") >= 200 and len(set(here)) > 200
    differ = [q for q, a, b in zip(QUERIES, here, ask(started.page, "as_json", QUERIES)) if a != b]
    assert differ == []


def test_the_pages_html_is_the_one_of_the_build(started):
    queries = [query for _, query, _ in planner_page.EXAMPLES]
    assert ask(started.page, "answer", queries) == [planner_page.answer(q) for q in queries]


def changed(name, old, new):
    """A file of the package with one part replaced, as the server would send it."""
    good = (ROOT / "companion" / name).read_text(encoding="utf-8")
    assert good.count(old) == 1
    return f"{planner_files.PLACE}/{name}", good.replace(old, new).encode()


def test_another_formula_is_seen_and_an_endless_search_is_given_up(visit, server, monkeypatch):
    """Python is sent one more byte a moment, and advice that never ends."""
    with visit(PAGE) as v:
        with monkeypatch.context() as broken:
            broken.setitem(server.extra, *changed("planner.py", '"bf16": (2, 2, 0, 2)',
                                                  '"bf16": (2, 2, 0, 3)'))
            broken.setitem(server.extra, *changed("planner_advice.py", "def advise(",
                                                  "def advise(plan):\n    while True: pass\n\n"
                                                  "def advise_no_more("))
            query = "model=3M&gpu="
            assert ask(v.page, "as_json", [query]) != [planner_page.as_json(query)]
            button(v.page).click()
            answer(v.page).get_by_text("Llama-2-7B,").wait_for(timeout=LONG)
        v.page.locator("#plan-model").fill("3M")
        v.page.locator("#plan-gpu").fill("300MiB")
        button(v.page).click()
        answer(v.page).get_by_text("0.003B parameters,").wait_for(timeout=LONG)
        quiet(v.page)
        assert alert(v.page).inner_text() == ""
        assert ask(v.page, "as_json", [query]) == [planner_page.as_json(query)]


# --- the address -------------------------------------------------------------------------------

SET_UP = {"model": "GPT-2 small", "method": "qlora", "gpu": "rtx 4090", "batch": "3", "rank": "8",
          "sequence": "512", "checkpointing": True, "gpus": "4", "shard": "3"}


def set_up(page):
    page.locator("#plan-method").select_option(SET_UP["method"])
    open_all(page)
    for name, value in SET_UP.items():
        control = page.locator(f"#plan-{name}")
        if isinstance(value, bool):
            control.set_checked(value)
        elif control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)


def comes_back(page, visit):
    """Findings where a page opened at this page's address does not hold the same set-up."""
    set_up(page)
    page.wait_for_timeout(600)  # the address waits for the end of the typing
    address = page.evaluate("() => location.hash")
    with visit(PAGE + address) as v:
        here, there = filled(page), filled(v.page)
        found = [f"{k}: {there[k]!r}, not {here[k]!r}" for k in here if here[k] != there[k]]
        found += [f"{k}: {there[k]!r}" for k in SET_UP if there[k] != SET_UP[k]]
        found += ["a fold with a changed value is closed"] * (
            not v.page.locator("#plan-rank").is_visible())
        return found + checks.loading(v)


def test_the_address_brings_the_set_up_back(fresh, visit, server):
    before = len(server.sent)
    clean(comes_back(fresh, visit))
    assert heavy(server.sent[before:]) == []
    address = fresh.evaluate("() => location.hash")
    assert fresh.get_by_role("link", name="Address of this set-up").get_attribute("href") == address
    assert planner_page.read(address[1:])[1].gpus == 4
    quiet(fresh)
    assert "qlora rank 8" in answer(fresh).inner_text()


@pytest.mark.parametrize("old, new, check", [
    ("form.hidden = false;", "form.hidden = false; startWorker();", fetched_early),
    ("return worker && plan();", "return plan();", fetched_early),
    ("history.replaceState(", "(() => {})(", comes_back),
    ('v === "1"', "false", comes_back),
    ("details.open ||=", "details.hidden ||=", comes_back),
])
def test_checks_of_the_form_can_fail(old, new, check, visit, site, server, monkeypatch):
    good = (site / "_static/planner.mjs").read_text(encoding="utf-8")
    assert good.count(old) == 1
    monkeypatch.setitem(server.extra, "_static/planner.mjs", good.replace(old, new).encode())
    start = len(server.sent)
    with visit(PAGE) as v:
        v.start = start
        assert fetched_early(v) if check is fetched_early else check(v.page, visit)


@pytest.mark.parametrize("address, name", [
    ("method=magic", "method"), ("colour=1&batch=2", "colour"), ("shard=9&method=lora", "shard")])
def test_an_address_the_form_does_not_know_is_said_and_the_form_can_be_used(address, name, visit):
    with visit(f"{PAGE}#{address}") as v:
        assert name in alert(v.page).inner_text()
        assert filled(v.page)["method"] in ("full", "lora")
        assert v.page.locator("#plan-method").is_enabled()
        clean(checks.loading(v))


def test_a_configuration_goes_into_the_address(fresh, visit):
    text = json.dumps({**CONFIGS[0], "note": "50 % & more #1 = é + ü"}, ensure_ascii=False)
    fresh.get_by_text("Or a model's config.json").click()
    fresh.locator("#plan-config").fill(text)
    planned(fresh)
    assert alert(fresh).inner_text() == "" and "llama" in answer(fresh).inner_text()
    with visit(PAGE + fresh.evaluate("() => location.hash")) as v:
        assert filled(v.page)["config"] == text


def test_a_method_keeps_what_was_typed_for_another(fresh):
    fresh.locator("#plan-optimizer").select_option("sgd")
    fresh.locator("#plan-method").select_option("inference")
    fresh.locator("#plan-new_tokens").fill("7")
    assert not fresh.locator("#plan-optimizer").is_visible()
    planned(fresh)
    assert alert(fresh).inner_text() == "" and "decode" in answer(fresh).inner_text()
    assert "optimizer" not in fresh.evaluate("() => location.hash")
    fresh.locator("#plan-method").select_option("full")
    assert filled(fresh)["optimizer"] == "sgd" and filled(fresh)["new_tokens"] == "7"


def test_an_example_and_an_advice_fill_the_form(fresh):
    example = fresh.locator("details.example", has_text="Inference, 8 sequences")
    example.locator("summary").click()
    example.get_by_role("link", name="Change this set-up").click()
    fresh.wait_for_function("() => document.querySelector('.answer').innerText.includes('decode')")
    quiet(fresh)
    assert filled(fresh)["batch"] == "8" and filled(fresh)["method"] == "inference"
    advice = fresh.get_by_role("region", name="What would make it fit")
    advice.get_by_role("link").first.click()
    fresh.wait_for_function("() => document.querySelector('.verdict-fits')")
    assert filled(fresh)["method"] == "inference"


# --- mistakes ----------------------------------------------------------------------------------

MISTAKES = [
    ("model", "Lama-2-7B", "Llama-2-7B"), ("model", "", "model"), ("gpu", "h1", "H1"),
    ("gpu", "24", "24GiB"), ("batch", "-1", "batch"), ("batch", "many", "'many'"),
    ("sequence", "", "sequence"), ("config", "{", "not JSON"), ("config", "{}", "model_type"),
    ("config", "[" * 500, "not JSON"), ("config", "[" * 10**5, "nests"),
]


def test_a_mistake_is_one_line_and_nothing_is_lost(fresh):
    answered = answer(fresh).inner_html()
    fresh.locator("details:has(> div #plan-config)").evaluate("d => { d.open = true; }")
    for name, value, word in MISTAKES:
        fresh.locator(f"#plan-{name}").fill(value)
        before = filled(fresh)
        planned(fresh)
        line = alert(fresh).inner_text()
        assert word in line and "\n" not in line.strip() and "Traceback" not in line
        assert "the set-up before" in line
        assert answer(fresh).inner_html() == answered and filled(fresh) == before
        marked = fresh.eval_on_selector_all("[aria-invalid]", "all => all.map(e => e.name)")
        assert marked == ([name] if line.startswith((name + " ", name + ":")) else [])
        clean(checks.overflow(fresh))
        fresh.locator(f"#plan-{name}").fill(planner_page.defaults()[name])
    planned(fresh)
    assert alert(fresh).inner_text() == "" and fresh.locator("[aria-invalid]").count() == 0


def test_json_can_be_saved(fresh):
    with fresh.expect_download(timeout=LONG) as download:
        fresh.get_by_role("button", name="Save as JSON").click()
    text = download.value.path().read_text(encoding="utf-8")
    assert download.value.suggested_filename == "plan.json" and text == planner_page.as_json("")


# --- keyboard, phone, axe ----------------------------------------------------------------------

def test_everything_by_keyboard(fresh):
    fresh.locator("#plan-model").focus()
    reached = []
    for _ in range(60):
        reached.append(fresh.evaluate("""() => {
            const e = document.activeElement;
            return e.name || e.textContent.trim();
        }"""))
        folded = "() => document.activeElement.matches('details:not([open]) > summary')"
        if fresh.evaluate(folded):
            fresh.keyboard.press("Enter")
        if reached[-1] == "Address of this set-up":
            break
        fresh.keyboard.press("Tab")
    shown = fresh.eval_on_selector_all("form.planner [name]", """all => all
        .filter(e => e.checkVisibility()).map(e => e.name)""")
    assert set(shown) - set(reached) == set() and {"gpus", "config", "loss"} <= set(shown)
    assert reached[-3:] == ["Plan", "Save as JSON", "Address of this set-up"]
    fresh.locator("#plan-batch").focus()
    fresh.keyboard.press("Control+a")
    fresh.keyboard.type("2")
    fresh.keyboard.press("Enter")
    answer(fresh).get_by_text("2 x 2048 tokens").wait_for(timeout=LONG)
    assert fresh.evaluate("() => document.activeElement.name") == "batch"
    quiet(fresh)


def test_phone_with_an_answer(fresh):
    open_all(fresh)
    fresh.set_viewport_size(PHONE)
    fresh.wait_for_timeout(400)
    clean(checks.overflow(fresh))
    for method in ("lora", "inference"):
        fresh.locator("#plan-method").select_option(method)
        fresh.wait_for_timeout(500)
        quiet(fresh)
        clean(checks.overflow(fresh))
    controls = "form.planner :is(button, select, input[type=text])"
    small = fresh.eval_on_selector_all(controls, """all =>
        all.filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 40)
        .map(e => e.outerHTML)""")
    clean(small)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("mistake", [False, True])
def test_accessible_with_an_answer(fresh, scheme, mistake):
    open_all(fresh)
    if mistake:
        fresh.locator("#plan-batch").fill("many")
        planned(fresh)
        assert alert(fresh).inner_text()
    fresh.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    fresh.wait_for_function("s => document.documentElement.dataset.theme === s", arg=scheme)
    clean(checks.accessibility(fresh))
