"""The built site in a real Chromium, served from this machine and nothing else.

The site is ``_build/html``, or the folder that ``SITE_DIR`` names.
"""
import contextlib
import functools
import gzip
import http.server
import importlib.util
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import site_checks
from site_checks import SITE

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
MISSING = ("no Chromium: install it (Debian, Ubuntu: apt-get install chromium)" if not CHROMIUM
           else "no Playwright: pip install playwright axe-playwright-python"
           if not all(map(importlib.util.find_spec, ("playwright", "axe_playwright_python")))
           else None)
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
         "--disable-background-networking --disable-component-update").split()
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css",
         ".svg": "image/svg+xml", ".json": "application/json", ".png": "image/png",
         ".woff": "font/woff", ".woff2": "font/woff2",
         ".mjs": "text/javascript", ".wasm": "application/wasm", ".zip": "application/zip",
         ".py": "text/x-python", ".csv": "text/csv"}


def pytest_collection_modifyitems(items):
    if MISSING:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(MISSING is not None and MISSING in str(r.longrepr) for r in skipped)
    if count:
        terminalreporter.write_line(f"{count} browser tests were skipped, {MISSING}")
    weights = {value for reports in terminalreporter.stats.values() for report in reports
               for name, value in getattr(report, "user_properties", ()) if name == "weight"}
    if weights:
        listed = ", ".join(f"{page} {size / 1e6:.2f}" for page, size in sorted(weights))
        terminalreporter.write_line(f"MB transferred on a first visit: {listed}")


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files as static hosts do: text compressed, no caching."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).lstrip("/") or "index.html"
        body, kind = self.server.body(path)
        self.send_response(404 if body is None else 200)
        body = body or b""
        packed = kind.startswith("text/") or kind in ("application/json", "image/svg+xml")
        if packed:
            body = _gzip(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.server.sent.append((path, len(body)))
        half = len(body) // 2
        with contextlib.suppress(ConnectionError):  # a closed tab is no error of ours
            self.wfile.write(body[:half])
            time.sleep(self.server.slow.get(path, 0))
            self.wfile.write(body[half:])

    def log_message(self, *args):
        pass


@functools.lru_cache(maxsize=None)
def _gzip(body):
    return gzip.compress(body, 6, mtime=0)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder.resolve()
        self.extra = {}  # path -> bytes: what a test adds to break something
        self.slow = {}  # path -> seconds between the halves of its body
        self.sent = []  # (path, bytes of body) of every answer
        self.url = f"http://127.0.0.1:{self.server_port}"

    def body(self, path):
        kind = KINDS.get(Path(path).suffix, "application/octet-stream")
        if path in self.extra:
            return self.extra[path], kind
        file = (self.folder / path).resolve()
        found = file.is_relative_to(self.folder) and file.is_file()
        return (file.read_bytes() if found else None), kind


class Visit:
    """One page in a context of its own, with a log of what went wrong on it."""

    def __init__(self, context, server):
        self.server = server
        self.errors, self.failed, self.outside = [], [], []
        self.page = context.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("requestfailed", lambda r: self.failed.append(r.url))
        self.page.on("response", lambda r: r.status >= 400 and self.failed.append(r.url))
        self.page.on("request", self._request)

    def _request(self, request):
        if not request.url.startswith((self.server.url + "/", "data:", "blob:")):
            self.outside.append(request.url)

    def go(self, path):
        self.name, before = path, len(self.server.sent)
        self.page.goto(f"{self.server.url}/{path}")
        self.page.evaluate("() => window.MathJax?.startup?.promise.then(() => true)")
        self.page.evaluate("() => document.fonts.ready.then(() => true)")
        self.weight = sum(size for _, size in self.server.sent[before:])
        return self


@pytest.fixture(scope="session")
def site():
    if not (SITE / "index.html").is_file():
        pytest.fail(f"{SITE} holds no built site: run `make book` first", pytrace=False)
    return SITE


@pytest.fixture(scope="session")
def server(site):
    with Server(site) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def visit(browser, server):
    """``with visit("intro.html") as v``: open a page as a reader who never came before."""
    @contextlib.contextmanager
    def opened(path, **options):
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        with browser.new_context(**options) as context:
            context.set_default_timeout(site_checks.TIMEOUT)
            yield Visit(context, server).go(path)
    return opened
