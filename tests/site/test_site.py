"""Every page of the built site, as a reader meets it."""
import re
import shutil

import pytest
import site_checks as checks
from site_checks import CHAPTERS, ROOT, TOC

HTML = [f"{name}.html" for name in TOC]
REPOSITORY = re.search(r"^\s+url: (\S+)", (ROOT / "_config.yml").read_text(), re.M)[1]
PHONE = {"width": 375, "height": 800}
browser_test = pytest.mark.browser


def clean(found):
    """All findings, one a line, not pytest's cut of a list."""
    assert not found, "\n".join(["", *found])


@pytest.fixture(scope="module", params=HTML)
def opened(request, visit):
    """One load of each page, on which the tests below look in turn."""
    with visit(request.param) as visited:
        yield visited


@browser_test
def test_loads_without_errors_from_this_machine_alone(opened):
    clean(checks.loading(opened))


@browser_test
def test_weight(opened, record_property):
    record_property("weight", (opened.name, opened.weight))
    assert opened.weight <= checks.WEIGHT


@browser_test
def test_images_have_texts(opened):
    clean(checks.images(opened.page))


@browser_test
def test_mathematics_is_set(opened):
    clean(checks.mathematics(opened.page))
    if opened.name.startswith("chapters/"):
        assert opened.page.locator("mjx-container").count() > 0


@browser_test
def test_buttons_lead_to_this_page(opened):
    urls = opened.page.eval_on_selector_all(".bd-header-article a", "all => all.map(a => a.href)")
    assert REPOSITORY in urls
    issue = [u for u in urls if u.startswith(f"{REPOSITORY}/issues/new?title=")]
    assert len(issue) == 1 and f"%2F{opened.name}" in issue[0]
    colab = [u for u in urls if "colab" in u]
    if opened.name.startswith("chapters/"):
        notebook = opened.name.replace(".html", ".ipynb")
        path = REPOSITORY.removeprefix("https://github.com/")
        assert colab == [f"https://colab.research.google.com/github/{path}/blob/main/{notebook}"]
        assert (ROOT / notebook).is_file()
    else:
        assert colab == []


@browser_test
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(opened, scheme):
    opened.page.set_viewport_size({"width": 1280, "height": 900})
    opened.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    opened.page.wait_for_function("s => document.documentElement.dataset.theme === s", arg=scheme)
    clean(checks.accessibility(opened.page))


@browser_test
def test_phone(opened):
    """No sideways scrolling; what scrolls inside itself can be reached by keyboard."""
    opened.page.emulate_media(color_scheme="light", reduced_motion="reduce")
    opened.page.set_viewport_size(PHONE)
    opened.page.wait_for_timeout(400)  # the theme waits as long before it looks again
    clean(checks.overflow(opened.page))
    clean(checks.accessibility(opened.page, contrast=False))  # seen above, and slow


@browser_test
@pytest.mark.parametrize("name", [*(f"{c}.html" for c in CHAPTERS), "_generated/claims.html"])
def test_prints(name, visit):
    with visit(name) as v:
        pdf = v.page.pdf(format="A4")
        assert pdf.startswith(b"%PDF") and len(pdf) > 10_000
        clean(checks.loading(v))


@browser_test
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_search_finds_the_chapter(chapter, visit):
    with visit("intro.html") as v:
        v.page.keyboard.press("Control+k")
        v.page.locator(".search-button__search-container input[type=search]").fill(chapter.split("/")[-1])
        v.page.keyboard.press("Enter")
        result = v.page.locator(f"#search-results a[href*='{chapter}.html']").first
        result.wait_for()
        v.page.wait_for_load_state("networkidle")  # it fetches a few lines of each page it found
        result.click()
        v.page.wait_for_url(f"**/{chapter}.html*")
        clean(checks.loading(v))


@browser_test
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_solutions_are_folded_and_open_by_keyboard(chapter, visit):
    with visit(f"{chapter}.html") as v:
        solutions = v.page.locator(".cell.tag_solution details")
        assert solutions.count() >= 4
        for solution in solutions.all():
            code = solution.locator("pre").first
            assert not code.is_visible()
            solution.locator("summary").focus()
            v.page.keyboard.press("Enter")
            code.wait_for(state="visible")


@browser_test
def test_claims_can_be_filtered(visit):
    with visit("_generated/claims.html") as v:
        items = v.page.locator("ul.claims > li")
        total = items.count()
        last = items.last.get_attribute("id")
        box = v.page.get_by_label("Show only claims with")

        def shown(text):
            box.fill(text)
            return items.locator("visible=true").count()

        assert shown(last.lower()) >= 1 and items.last.is_visible()
        assert shown(last) < total
        assert shown("no claim says this") == 0
        assert "0 of" in v.page.locator("output").inner_text()
        assert shown("") == total


@browser_test
def test_claims_without_script(visit):
    with visit("_generated/claims.html", java_script_enabled=False) as v:
        items = v.page.locator("ul.claims > li")
        assert items.count() == items.locator("visible=true").count() > 0
        assert not v.page.get_by_label("Show only claims with").is_visible()


@browser_test
def test_claim_leads_to_its_cell_and_back(visit):
    with visit("_generated/claims.html") as v:
        link = v.page.get_by_role("link", name="the cell that checks").first
        id = link.get_attribute("href").partition("#claim-")[2]
        link.click()
        back = v.page.locator(f"a[href$='claims.html#{id}']").first
        back.wait_for()
        assert v.page.locator(f"#claim-{id}").count() == 1
        back.click()
        v.page.wait_for_url(f"**/claims.html#{id}")


# --- the files alone ----------------------------------------------------------

def test_one_page_for_each_entry_of_the_contents(site):
    clean(checks.pages_built(site, TOC))


def test_internal_links_and_anchors_resolve(site):
    clean(checks.links(site, [*HTML, "index.html", "search.html", "genindex.html"]))


def test_every_checked_claim_leads_to_a_cell(site):
    source = (site / "_generated/claims.html").read_text(encoding="utf-8")
    items = re.findall(r'<li id="(C\w+)">(.*?)</li>', source, re.S)
    checked = {id for id, item in items if "status-checked" in item}
    assert checked
    assert checked - {id for id, item in items if f"#claim-{id}" in item} == set()


def test_vendored_files_match_their_checksums():
    import hashlib
    for sums in (ROOT / "_static").rglob("SHA256SUMS"):
        listed = dict(reversed(line.split()) for line in sums.read_text().splitlines())
        there = {f"./{p.relative_to(sums.parent)}" for p in sums.parent.rglob("*")
                 if p.is_file() and p != sums}
        assert there == set(listed)
        for name, digest in listed.items():
            assert hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() == digest, name


# --- the checks can fail ------------------------------------------------------

def add(html):
    return f"""() => document.querySelector("article").insertAdjacentHTML("beforeend", `{html}`)"""


@browser_test
@pytest.mark.parametrize("check, breaking", [
    (checks.images, add('<img src="../_static/logo.svg">')),
    (checks.images, add('<img src="data:," alt="a picture that is not there">')),
    (checks.overflow, add('<div style="width: 900px">wide</div>')),
    (checks.accessibility, add('<p style="color: #999; background: #aaa">faint</p>')),
    (checks.accessibility, add("<button></button>")),
    (checks.mathematics, add('<span class="math">$x$</span>')),
    (checks.mathematics, add("<mjx-merror>Undefined control sequence</mjx-merror>")),
])
def test_checks_of_a_page_can_fail(check, breaking, visit):
    with visit("_generated/status.html", viewport=PHONE) as v:
        assert check(v.page) == []
        v.page.evaluate(breaking)
        v.page.wait_for_timeout(200)
        assert check(v.page) != []


@browser_test
@pytest.mark.parametrize("breaking", [
    "() => console.error('broken')",
    "() => { setTimeout(() => { throw new Error('broken') }) }",
    "() => fetch('../no-such-file').catch(() => 0)",
    "() => document.head.append(Object.assign(document.createElement('script'),"
    " {src: 'https://elsewhere.invalid/x.js'}))",
])
def test_check_of_loading_can_fail(breaking, visit):
    with visit("_generated/status.html") as v:
        clean(checks.loading(v))
        v.page.evaluate(breaking)
        v.page.wait_for_timeout(300)
        assert checks.loading(v) != []


def on_chapter(test):
    def run(visit):
        with visit(f"{CHAPTERS[0]}.html") as v:
            test(v)
    return run


@browser_test
@pytest.mark.parametrize("test, path, old, new", [
    (on_chapter(test_buttons_lead_to_this_page), f"{CHAPTERS[0]}.html", "/issues/new", "/pulls"),
    (on_chapter(test_buttons_lead_to_this_page), f"{CHAPTERS[0]}.html", ".ipynb", ".md"),
    (on_chapter(test_mathematics_is_set), "_static/mathjax/input/tex.js", "MathJax", "Mathjax"),
    (on_chapter(test_phone), "_static/site.js", "box.tabIndex = 0", "box.title = ''"),
    (lambda visit: test_search_finds_the_chapter(CHAPTERS[0], visit),
     "searchindex.js", "Search.setIndex", "void"),
    (lambda visit: test_solutions_are_folded_and_open_by_keyboard(CHAPTERS[0], visit),
     f"{CHAPTERS[0]}.html", "<details", "<details open"),
    (test_claims_can_be_filtered, "_static/site.js", "item.hidden =", "item.title ="),
    (test_claims_without_script, "_generated/claims.html",
     '<ul class="claims">', '<ul class="claims" hidden>'),
    (test_claim_leads_to_its_cell_and_back, f"{CHAPTERS[0]}.html", "claims.html#", "claims.html?"),
], ids="issues colab math reach search solutions filter noscript claim".split())
def test_test_fails_on_a_broken_site(test, path, old, new, visit, server, site, monkeypatch):
    from playwright.sync_api import Error
    monkeypatch.setattr(checks, "TIMEOUT", 1500)
    good = (site / path).read_text(encoding="utf-8")
    assert old in good
    monkeypatch.setitem(server.extra, path, good.replace(old, new).encode())
    with pytest.raises((AssertionError, Error)):
        test(visit)


@browser_test
def test_weight_counts_what_is_transferred(visit, server, monkeypatch):
    page, _ = server.body("intro.html")
    heavy = b'<img src="heavy.bin" alt="heavy"></body>'
    monkeypatch.setitem(server.extra, "intro.html", page.replace(b"</body>", heavy))
    monkeypatch.setitem(server.extra, "heavy.bin", bytes(checks.WEIGHT))
    with visit("intro.html") as v:
        assert v.weight > checks.WEIGHT


@pytest.mark.parametrize("breaking", [
    '<a href="status.html#nowhere">x</a>', '<a href="../gone.html">x</a>', '<img src="gone.png">'])
def test_check_of_links_can_fail(breaking, site, tmp_path):
    copy = tmp_path / "html"
    shutil.copytree(site, copy)
    page = copy / "_generated/status.html"
    page.write_text(page.read_text(encoding="utf-8") + breaking, encoding="utf-8")
    assert len(checks.links(copy, ["_generated/status.html"])) == 1


def test_check_of_pages_can_fail(site, tmp_path):
    for name in TOC:
        page = tmp_path / f"{name}.html"
        page.parent.mkdir(exist_ok=True)
        shutil.copy(site / f"{name}.html", page)
    clean(checks.pages_built(tmp_path, TOC))
    (tmp_path / "stray.html").touch()
    (tmp_path / f"{TOC[0]}.html").write_text("")
    (tmp_path / f"{TOC[1]}.html").unlink()
    assert checks.pages_built(tmp_path, TOC) == [
        f"missing: {TOC[1]}", "not in the contents: stray", f"empty: {TOC[0]}"]
