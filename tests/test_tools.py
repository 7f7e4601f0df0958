"""The tools on a small book of their own, with each accident that must not cost anything."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from notebooks import ROOT
from test_rules import HEADER

GOOD = """
# Demo

```{code-cell} ipython3
:tags: [setup, remove-cell]

# filled in by make sync
```

```{code-cell} ipython3
from companion import measured, claim
import random
print("exact", 6 * 7, measured(random.random(), ".3f"))
claim("C001", 6 * 7 == 42)
```

```{code-cell} ipython3
:tags: [needs-gpu]

%%needs_gpu
print("on a GPU")
```
"""


def make_book(tmp_path):
    """A copy of the tools and the package with one short chapter."""
    for folder in ("tools", "companion"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "_config.yml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "companion/claims.csv").write_text(
        "id,chapter,statement,kind,status,band,misstated,source\nC001,demo,It is 42.,exact,checked,equal,,\n")
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters/demo.md").write_text(HEADER + GOOD)
    return tmp_path


def tool(book, name, *arguments, **options):
    environment = {k: v for k, v in os.environ.items() if k not in ("COMPANION_NETWORK", "PYTHONPATH")}
    done = subprocess.run([sys.executable, book / "tools" / f"{name}.py", *arguments], cwd=book,
                          capture_output=True, text=True, env=environment, **options)
    assert f'File "{book}/tools' not in done.stderr, done.stderr  # the tools' own traceback
    return done


def notebook(book):
    return nbformat.read(book / "chapters/demo.ipynb", as_version=4)


def edit(book, old, new, file="chapters/demo.md"):
    path = book / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def append(book, cell):
    path = book / "chapters/demo.md"
    path.write_text(path.read_text() + f"\n```{{code-cell}} ipython3\n{cell}\n```\n")


def leftovers():
    """Kernels and sandboxes that a run should have taken with it."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "ipykernel_launcher" in line and "chapter-" in line]


@pytest.fixture
def book(tmp_path):
    return make_book(tmp_path)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    book = make_book(tmp_path_factory.mktemp("book"))
    done = tool(book, "execute")
    assert done.returncode == 0, done.stderr
    return book


@pytest.fixture
def stored(executed, tmp_path):
    """The book after its outputs were stored: a copy for each test."""
    return shutil.copytree(executed, tmp_path, dirs_exist_ok=True)


def test_store_then_compare(stored):
    cells = notebook(stored).cells
    assert cells[2].outputs[0].text.startswith("exact 42 ‹") and "✓ C001 It is 42." in cells[2].outputs[0].text
    done = tool(stored, "run_nbval", "demo")
    assert "2 cells compared, 0 differ, 1 skipped" in done.stdout and done.returncode == 0
    record = json.loads((stored / "build/records/demo.cpu.json").read_text())
    assert record["cells"] == {"compared": 2, "failed": 0, "skipped": {"needs 1 GPU": 1}}
    assert tool(stored, "records", "promote").stdout == "recorded demo on the cpu\n"
    status = tool(stored, "records", "status")
    assert "demo                      cpu     fresh" in status.stdout
    assert "some GPU cells have never run" in status.stdout and status.returncode == 1
    edit(stored, "6 * 7, measured", "42, measured")
    tool(stored, "sync")
    assert "cpu     stale" in tool(stored, "records", "status").stdout


def test_storing_twice_changes_only_what_is_measured(stored):
    before = notebook(stored)
    tool(stored, "execute")
    after = notebook(stored)
    assert before.cells[2].outputs != after.cells[2].outputs  # the random number
    for nb in (before, after):
        nb.cells[2].outputs = []
    assert before == after


def test_sync_refuses_an_option_it_does_not_know_before_it_touches_anything(stored):
    append(stored, "x = 1")  # so that there is something to sync
    before = {p: p.read_bytes() for p in stored.glob("chapters/*")}
    done = tool(stored, "sync", "--help")
    assert done.returncode and "no such option: --help" in done.stderr
    assert {p: p.read_bytes() for p in stored.glob("chapters/*")} == before


def test_sync_keeps_outputs_ids_and_folding_and_is_done_at_once(stored):
    before = notebook(stored)
    append(stored, "---\ntags: [hide-input]\njupyter: {source_hidden: true}\ncellView: form\n---\nx = 1")
    tool(stored, "sync")
    after = notebook(stored)
    assert [c.id for c in after.cells[:4]] == [c.id for c in before.cells]
    assert after.cells[2].outputs == before.cells[2].outputs
    assert after.cells[-1].metadata == {"tags": ["hide-input"], "jupyter": {"source_hidden": True}, "cellView": "form"}
    assert tool(stored, "sync").stdout == ""


def test_a_reworded_claim_makes_nothing_stale(stored):
    edit(stored, "It is 42.", "Six by seven is 42.", "companion/claims.csv")
    tool(stored, "sync")
    assert "✓ C001 Six by seven is 42." in notebook(stored).cells[2].outputs[0].text
    assert tool(stored, "run_nbval").returncode == 0


def test_a_notebook_edited_by_hand_is_refused_and_kept(stored):
    nb = notebook(stored)
    nb.cells[2].source += "\nprint('my edit')"
    nbformat.write(nb, stored / "chapters/demo.ipynb")
    for name in ("sync", "execute"):
        done = tool(stored, name)
        assert done.returncode == 1 and "chapters/demo.ipynb was edited by hand" in done.stderr
    assert "my edit" in notebook(stored).cells[2].source
    assert tool(stored, "sync", "--discard").returncode == 0
    assert "my edit" not in notebook(stored).cells[2].source


@pytest.mark.parametrize("cell, message", [
    ("1 / 0", "raised ZeroDivisionError"),
    ("import time\ntime.sleep(60)", "ran longer than 3 s"),
    ("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)", "ran longer than 3 s"),
    ("import os\nos.kill(os.getpid(), 9)", "killed its kernel"),
    ("claim('C001', False)", "C001 does not hold here"),
    ("claim('C009', True)", "no 'C009' in claims.csv"),
    ("import urllib.request\nurllib.request.urlopen('http://192.0.2.1', timeout=9)", "raised URLError"),
    ("open(__import__('companion').__file__ + '/../../tools/sync.py')", "Error")])
def test_a_cell_that_fails_stores_nothing(stored, cell, message):
    before = (stored / "chapters/demo.ipynb").read_bytes()
    append(stored, cell)
    started = time.monotonic()
    done = tool(stored, "execute", "--cell-seconds", "3")
    assert done.returncode == 1 and "chapters/demo.md: code cell 3" in done.stderr and message in done.stderr
    assert (stored / "chapters/demo.ipynb").read_bytes() == before
    assert time.monotonic() - started < 30 and not leftovers()


@pytest.mark.parametrize("cell, message", [
    ("import time\ntime.sleep(60)", "Timeout of 3 seconds exceeded"),
    ("import os\nos.kill(os.getpid(), 9)", "the cell killed its kernel"),
    ("1 / 0", "ZeroDivisionError"),
    ("print('other')", "Cell outputs differ"),
    ("import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()", "Unexpected output fields")])
def test_the_comparison_names_the_cell(stored, cell, message):
    append(stored, "pass")
    append(stored, "print('after')")
    tool(stored, "execute")
    nb = notebook(stored)
    nb.cells[4].source = cell
    nbformat.write(nb, stored / "chapters/demo.ipynb")
    started = time.monotonic()
    done = tool(stored, "run_nbval", "--cell-seconds", "3")
    assert done.returncode == 1 and "chapters/demo.ipynb: code cell 3" in done.stderr and message in done.stderr
    assert time.monotonic() - started < 30 and not leftovers()
    after = {"kill": "Kernel dead on test start", "sleep": "does not count: an earlier cell hung"}
    for word, text in after.items():
        assert (text in done.stderr) is (word in cell)
    record = json.loads((stored / "build/records/demo.cpu.json").read_text())
    assert record["cells"]["failed"] == (2 if "kill" in cell or "sleep" in cell else 1)


def test_a_cell_that_never_ran_is_not_called_equal(book):
    tool(book, "sync")
    done = tool(book, "run_nbval")
    assert done.returncode == 1 and "never executed" in done.stderr


def test_a_missing_picture_is_noticed(stored):
    append(stored, "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()")
    tool(stored, "execute")
    nb = notebook(stored)
    nb.cells[4].outputs *= 2
    nbformat.write(nb, stored / "chapters/demo.ipynb")
    done = tool(stored, "run_nbval")
    assert done.returncode == 1 and ("1 pictures now, 2 stored" in done.stderr or "dissimilar number" in done.stderr)


def test_resuming_leaves_out_what_passed(stored):
    tool(stored, "run_nbval", "--resume")
    assert "passed before" in tool(stored, "run_nbval", "--resume").stdout
    edit(stored, "6 * 7, measured", "42, measured")
    tool(stored, "execute")
    assert "2 cells compared" in tool(stored, "run_nbval", "--resume").stdout


def test_interrupting_leaves_the_stored_notebook_and_no_process(stored):
    before = (stored / "chapters/demo.ipynb").read_bytes()
    append(stored, "import time\ntime.sleep(100)")
    process = subprocess.Popen([sys.executable, stored / "tools/execute.py"], cwd=stored, stderr=subprocess.PIPE,
                               text=True, start_new_session=True, env=dict(os.environ, TMPDIR=str(stored)))
    deadline = time.monotonic() + 30
    while not list(stored.glob("chapter-*/work/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C sends
    error = process.communicate(timeout=30)[1]
    assert "interrupted; the chapter being run is unchanged" in error and "Traceback" not in error
    assert (stored / "chapters/demo.ipynb").read_bytes() == before
    assert not list(stored.glob("chapter-*")) and not leftovers()


def test_a_full_disk_keeps_the_stored_notebook(stored):
    before = (stored / "chapters/demo.ipynb").read_bytes()
    code = ("import resource, signal, sys; sys.path.insert(0, 'tools'); import notebooks\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
            "nb = notebooks.read('chapters/demo.ipynb')\n"
            "try: notebooks.write(nb, 'chapters/demo.ipynb')\n"
            "except notebooks.Refused as refused: print(refused)")
    done = subprocess.run([sys.executable, "-c", code], cwd=stored, capture_output=True, text=True)
    assert "chapters/demo.ipynb could not be written" in done.stdout, done.stderr
    assert (stored / "chapters/demo.ipynb").read_bytes() == before
    assert [p.name for p in (stored / "chapters").iterdir() if p.name.startswith(".demo")] == []


@pytest.mark.parametrize("text, message", [
    ("no header\n", "no code cell tagged `setup`"),
    (HEADER + "# T\n\n```{code-cell} ipython3\n:tags: [setup\n\nx\n```\n", "chapters/demo.md"),
    (HEADER + "# T\n\n```{code-cell} ipython3\nx = 1\n```\n", "no code cell tagged `setup`")])
def test_a_bad_text_is_one_clear_line(book, text, message):
    (book / "chapters/demo.md").write_text(text)
    done = tool(book, "sync")
    assert done.returncode == 1 and message in done.stderr and "chapters/demo.md" in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 7}'])
def test_a_broken_notebook_is_one_clear_line(book, text):
    (book / "chapters/demo.ipynb").write_text(text)
    done = tool(book, "sync")
    assert done.returncode == 1 and "chapters/demo.ipynb is not a readable notebook" in done.stderr


def test_an_unknown_chapter_is_one_clear_line(book):
    for name in ("sync", "execute", "run_nbval", "rules"):
        done = tool(book, name, "dmeo")
        assert done.returncode == 1 and "no chapter 'dmeo'" in done.stderr and "There are: demo" in done.stderr


def test_without_a_gpu_the_gpu_runner_says_so(stored):
    for name, flags in (("execute", ["--gpu"]), ("run_nbval", ["--runner", "gpu"])):
        done = tool(stored, name, *flags)
        assert done.returncode == 1 and "no CUDA GPU" in done.stderr


def test_one_address_is_changed_everywhere(stored):
    subprocess.run("git init -q . && git add -A", shell=True, cwd=stored, check=True)
    new = "https://github.com/someone/fork"
    done = tool(stored, "repository", new)
    assert done.returncode == 0, done.stderr
    for name in ("_config.yml", "pyproject.toml", "chapters/demo.md", "chapters/demo.ipynb"):
        assert new in (stored / name).read_text(), name
    assert tool(stored, "repository", "ftp://x").returncode == 1
