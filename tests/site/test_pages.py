"""The generated pages and the build, on a small book: good input, and bad of each kind."""
import json
import re
import shutil
import subprocess

import nbformat
import pytest

import pages
import records
from fingerprint import fingerprint
from site_checks import ROOT

BOOK_PYTHON = ROOT / ".venv/book/bin/python"
V4 = nbformat.v4
PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
          "language_info": {"name": "python"}}
CLAIMS = """id,chapter,statement,kind,status,band,misstated,source
C001,small,Two and two are < five,exact,checked,equal,Two and two are five,https://example.org/a_b.
C002,small,Cited `only`,hardware,cited,,,
C003,small,Gone,opinion,withdrawn,,Once said,no source
"""
REFERENCES = """key,authors,year,title,venue,url
peano1889,Giuseppe Peano,1889,Arithmetices principia,Bocca,https://example.org/peano
"""
RECORD = {"chapter": "small", "runner": "cpu", "when": "2026-01-02T03:04:05+00:00",
          "device": "CPU", "versions": {"python": "3.11"}, "fingerprint": "?",
          "cells": {"compared": 2, "skipped": {"needs a GPU": 1}, "failed": 0},
          "seconds": 1.5, "network": "cut"}
HARDWARE = '''
from dataclasses import dataclass, field
@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int = field(metadata={"unit": "bytes", "label": "Memory"})
    rate: float | None = field(metadata={"unit": "FLOP/s", "label": "Rate"})
    capability: tuple = field(metadata={"label": "Capability"})
    source: str = "https://example.org/sheet"
    notes: str = "A note."
GPUS = {"A": Gpu("A", 16 * 2**30, 65e12, (7, 5)), "B": Gpu("B", 2**30, None, (8, 0))}
'''


def cell(source, text):
    return V4.new_code_cell(source, execution_count=1, outputs=[
        V4.new_output("stream", name="stdout", text=text)])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A book of one chapter, with all that the pages are made from."""
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "chapters/records")
    monkeypatch.setattr(records, "LOCAL", tmp_path / "build/records")
    for folder in ("companion", "chapters/records"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: intro\nchapters:\n- file: chapters/small\n")
    (tmp_path / "companion/claims.csv").write_text(CLAIMS)
    (tmp_path / "companion/hardware.py").write_text(HARDWARE)
    (tmp_path / "references.csv").write_text(REFERENCES)
    nb = V4.new_notebook(metadata=PYTHON, cells=[
        V4.new_markdown_cell("# Small\n\n## Part\n\n$x^2$"), cell("x = 4", "4\n"),
        cell('claim("C001", x < 5)', "✓ C001 Two and two are < five\n")])
    nbformat.write(nb, tmp_path / "chapters/small.ipynb")
    return tmp_path


def notebook(root):
    return nbformat.read(root / "chapters/small.ipynb", 4)


def write_record(root, **changes):
    (root / "chapters/records/small.cpu.json").write_text(json.dumps({**RECORD, **changes}))


def test_claims_lead_to_their_cells_and_sources(root):
    page = pages.pages(root)["claims"]
    assert 'href="../chapters/small.html#claim-C001"' in page
    assert "#claim-C002" not in page and "#claim-C003" not in page
    assert "Two and two are &lt; five" in page and "<code>only</code>" in page
    assert '<a href="https://example.org/a_b">https://example.org/a_b</a>.' in page
    assert "3 claims" in page


def test_misstatements_leave_out_what_is_withdrawn(root):
    page = pages.pages(root)["misstatements"]
    assert "Two and two are five" in page and "Once said" not in page


def test_a_cell_that_printed_the_claim_wins():
    cells = [('claim("C001", ok)', ""), ("loop()", "x\n✓ C001 so\n"), ("claim( 'C002', ok)", "")]
    assert pages.claims_by_cell(cells) == {"C001": 1, "C002": 2}


def test_hardware_is_shown_in_one_unit_a_column(root):
    page = pages.pages(root)["hardware"]
    assert 'Memory <span class="unit">GiB</span>' in page
    assert 'Rate <span class="unit">TFLOP/s</span>' in page
    assert '<th scope="row">A</th><td>16</td>' in page and "<td>65</td>" in page
    assert "<td>–</td>" in page and "<td>7.5</td>" in page
    assert page.count("https://example.org/sheet") == 2


def test_status_says_fresh_stale_failed_or_never_run(root):
    def status():
        return re.findall(r'<span class="status [^>]*>([^<]*)<', pages.pages(root)["status"])

    nb = notebook(root)
    assert status() == ["stale", "never run"]  # outputs of code that nobody can tell
    now = fingerprint(nb, "cpu")
    nb.metadata["companion"] = {"cpu": now}
    nbformat.write(nb, root / "chapters/small.ipynb")
    assert status() == ["never run", "never run"]
    write_record(root)
    assert status()[0] == "stale"
    write_record(root, fingerprint=now, cells={"compared": 2, "skipped": {}, "failed": 1})
    assert status()[0] == "failed"
    write_record(root, fingerprint=now)
    assert status()[0] == "fresh"
    page = pages.pages(root)["status"]
    assert "2026-01-02 03:04 UTC" in page and "1: needs a GPU" in page
    nb.cells[1].source = "x = 5"
    nbformat.write(nb, root / "chapters/small.ipynb")
    assert status()[0] == "stale"


def test_unchanged_pages_are_not_written_again(root):
    pages.main(root)
    page = root / "_generated/claims.md"
    before = page.stat().st_mtime_ns
    pages.main(root)
    assert page.stat().st_mtime_ns == before


def bad_csv(line):
    return lambda root: (root / "companion/claims.csv").write_text(CLAIMS + line)


def store_error(root):
    nb = notebook(root)
    nb.cells[1].outputs = [V4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    nbformat.write(nb, root / "chapters/small.ipynb")


@pytest.mark.parametrize("breaking, name", [
    (bad_csv("C004,small\n"), "claims.csv line 5"),
    (bad_csv('C004,small,"no end,exact,checked,,,\n'), "claims.csv line"),
    (bad_csv("C001,small,Twice,exact,checked,,,\n"), "'C001' stands twice"),
    (bad_csv("C004,small,Sure,exact,certain,,,\n"), "C004 has status 'certain'"),
    (lambda r: (r / "companion/claims.csv").write_text("id,statement\n"), "claims.csv: the first"),
    (lambda r: (r / "companion/claims.csv").write_bytes(b"\xff\n"), "claims.csv is not UTF-8"),
    (lambda r: (r / "companion/claims.csv").unlink(), "claims.csv is missing"),
    (lambda r: (r / "references.csv").unlink(), "references.csv is missing"),
    (lambda r: (r / "companion/hardware.py").unlink(), "hardware.py is missing"),
    (lambda r: (r / "chapters/small.ipynb").unlink(), "small.ipynb is missing"),
    (lambda r: (r / "chapters/small.ipynb").write_text("{"), "small.ipynb is not a readable"),
    (store_error, "small.ipynb stores an error"),
    (lambda r: (r / "chapters/records/small.cpu.json").write_text("{"), "small.cpu.json"),
    (lambda r: (r / "chapters/records/small.cpu.json").write_text("[]"), "small.cpu.json"),
    (lambda r: write_record(r, when="soon"), "small on the cpu: when is 'soon'"),
    (lambda r: write_record(r, seconds=None), "small on the cpu: seconds is None"),
    (lambda r: write_record(r, cells={"compared": 1, "failed": 0}), "cells.skipped is None"),
])
def test_bad_input_is_refused_in_one_line_that_names_the_file(breaking, name, root):
    breaking(root)
    with pytest.raises(SystemExit) as refused:
        pages.main(root)
    message = str(refused.value)
    assert name in message and "\n" not in message
    assert not (root / "_generated").exists()


# --- Jupyter Book, called as `make book` calls it -----------------------------

def build(root):
    return subprocess.run([BOOK_PYTHON.with_name("jupyter-book"), "build", ".", "-W", "-n",
                           "--keep-going"], cwd=root, capture_output=True, text=True)


@pytest.fixture
def book(root):
    if not BOOK_PYTHON.exists():
        pytest.skip("no .venv/book: run `make book`")
    shutil.copy(ROOT / "_config.yml", root)
    shutil.copytree(ROOT / "_static", root / "_static", ignore=shutil.ignore_patterns("mathjax", "pyodide"))
    shutil.copytree(ROOT / "tools", root / "tools")
    (root / "_toc.yml").write_text("format: jb-book\nroot: intro\nchapters:\n"
                                   "- file: chapters/small\n- file: _generated/claims\n")
    (root / "intro.md").write_text("# Book\n\n[a part](chapters/small.ipynb#part)\n")
    pages.main(root)
    return root


def test_build_gives_claims_their_ids_and_links(book):
    built = build(book)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (book / "_build/html/chapters/small.html").read_text(encoding="utf-8")
    assert page.count('id="claim-C001"') == 1
    assert '<a href="../_generated/claims.html#C001">✓ C001</a> Two and two' in page
    assert "unpkg" not in page and "jsdelivr" not in page
    assert page.count("mathjax/startup.js") == 1
    intro = (book / "_build/html/intro.html").read_text(encoding="utf-8")
    assert "mathjax/" not in intro and 'href="chapters/small.html#part"' in intro


@pytest.mark.parametrize("file, text, said", [
    ("_toc.yml", "format: jb-book\nroot: intro\nchapters:\n- file: gone\n", "gone"),
    ("intro.md", "# Book\n\n[no such page](gone.md)\n", "gone.md"),
    ("intro.md", "# Book\n\n[no such part](chapters/small.ipynb#gone)\n", "gone"),
    ("intro.md", "# Book\n\n```{no-such-directive}\n```\n", "no-such-directive"),
])
def test_a_warning_stops_the_build(file, text, said, book):
    (book / file).write_text(text)
    built = build(book)
    assert built.returncode != 0
    assert said in built.stdout + built.stderr
