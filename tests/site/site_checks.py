"""What must hold on every page. Each check returns its findings: a list, empty when all is well."""
import html.parser
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("SITE_DIR", ROOT / "_build/html"))
TOC = re.findall(r"^(?:root|\s*- file): (\S+)", (ROOT / "_toc.yml").read_text(), re.M)
CHAPTERS = [page for page in TOC if page.startswith("chapters/")]

TIMEOUT = 10_000  # ms that a page may take to show what a test waits for
WEIGHT = 1_500_000  # bytes of all bodies that a first visit transfers


# --- in the browser -----------------------------------------------------------

def loading(visit):
    """Console errors, failed requests, and any request to another machine."""
    return ([f"console: {text}" for text in visit.errors]
            + [f"failed: {url}" for url in visit.failed]
            + [f"outside: {url}" for url in visit.outside])


def images(page):
    """Images without a text, and images that did not load."""
    return page.eval_on_selector_all("img", """all => all
        .filter(i => !i.alt.trim() || (i.complete && !i.naturalWidth))
        .map(i => `${i.alt.trim() ? "not loaded" : "no alt"}: ${i.outerHTML.slice(0, 120)}`)""")


def overflow(page):
    """What makes the page itself scroll sideways."""
    return page.evaluate("""() => {
        const root = document.scrollingElement, width = root.clientWidth;
        if (root.scrollWidth <= width) return [];
        const wide = [...document.body.querySelectorAll("*")].filter(
            e => e.getBoundingClientRect().right > width + 1).slice(-3);
        return [`${root.scrollWidth} px`, ...wide.map(e => e.outerHTML.slice(0, 120))];
    }""")


def accessibility(page, contrast=True):
    """What axe calls serious or critical.

    A chapter has thousands of highlighted words of a few classes. Only the first of each
    stays an element here, else axe spends half a minute on the contrast of code alone.
    """
    from axe_playwright_python.sync_playwright import Axe
    page.evaluate("""() => {
        const seen = new Set();
        for (const word of document.querySelectorAll(".highlight pre > span:not(:has(a))")) {
            const box = word.closest(".highlight").parentElement;
            const kind = `${word.className} in ${box.className}`;
            if (seen.has(kind)) word.replaceWith(word.textContent);
            seen.add(kind);
        }
    }""")
    options = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": contrast}}}
    result = Axe().run(page, options=options)
    return [f"{v['id']}: {node['html'][:160]}" for v in result.response["violations"]
            if v["impact"] in ("serious", "critical") for node in v["nodes"]]


def mathematics(page):
    """Formulas that were not set, and TeX that does not parse."""
    return page.evaluate(r"""() => {
        const found = [...document.querySelectorAll(
            "mjx-merror, mjx-container mjx-mtext[style*='red']")].map(e => e.textContent);
        for (const e of document.querySelectorAll(".math"))
            if (!e.querySelector("mjx-container mjx-assistive-mml"))
                found.push(`not set: ${e.textContent.slice(0, 80)}`);
        return found;
    }""")


# --- in the files -------------------------------------------------------------

class Page(html.parser.HTMLParser):
    """Ids and addresses of one HTML file."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(Path(file).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id"), attributes.get("name") if tag == "a" else None}
        self.links += [attributes[k] for k in ("href", "src") if attributes.get(k)]


def links(folder, names):
    """Internal links of the pages ``names`` whose file or anchor does not exist."""
    pages, found = {}, []

    def parsed(file):
        return pages.setdefault(file, Page(file)) if file not in pages else pages[file]

    for name in names:
        file = (folder / name).resolve()
        for link in parsed(file).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.is_file():
                found.append(f"{name}: {link} leads nowhere")
            elif (anchor and "=" not in anchor  # the planner's: a set-up, not a place
                  and target.suffix == ".html" and anchor not in parsed(target).ids):
                found.append(f"{name}: {link} names no id there")
    return found


def pages_built(folder, toc):
    """Pages of the contents that are missing or empty, and pages that nobody asked for."""
    made = {str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.html")
            if not p.relative_to(folder).parts[0] == "_static"}
    extra = made - set(toc) - {"index", "search", "genindex"}
    return ([f"missing: {name}" for name in sorted(set(toc) - made)]
            + [f"not in the contents: {name}" for name in sorted(extra)]
            + [f"empty: {name}" for name in toc if name in made and not _has_text(folder, name)])


def _has_text(folder, name):
    source = (folder / f"{name}.html").read_text(encoding="utf-8")
    return "<h1>" in source and "<article" in source
