"""What makes stored outputs stale, and what does not."""
import ast
import shutil
import subprocess
import sys

import nbformat
import pytest

import fingerprint as fp
from notebooks import ROOT


def notebook(*sources, tags=()):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for number, tag in tags:
        cells[number].metadata["tags"] = [tag]
    return nbformat.v4.new_notebook(cells=cells)


BASE = notebook("x = 1", "%%needs_gpu\ny = 2", tags=[(1, "needs-gpu")])


def same(nb, runner, base=BASE):
    return fp.fingerprint(nb, runner) == fp.fingerprint(base, runner)


def test_comments_and_prose_make_nothing_stale():
    nb = notebook("x = 1  # why", "%%needs_gpu\ny  =  2", tags=[(1, "needs-gpu")])
    nb.cells.insert(0, nbformat.v4.new_markdown_cell("Reworded."))
    assert same(nb, "cpu") and same(nb, "gpu")


def test_the_set_up_cell_does_not_count():
    nb = notebook("import this", "x = 1", "%%needs_gpu\ny = 2", tags=[(0, "setup"), (2, "needs-gpu")])
    assert same(nb, "cpu") and same(nb, "gpu")


def test_an_edited_gpu_cell_is_stale_on_the_gpu_only():
    nb = notebook("x = 1", "%%needs_gpu\ny = 3", tags=[(1, "needs-gpu")])
    assert same(nb, "cpu") and not same(nb, "gpu")


@pytest.mark.parametrize("nb", [
    notebook("x = 2", "%%needs_gpu\ny = 2", tags=[(1, "needs-gpu")]),
    notebook("%%needs_gpu\ny = 2", "x = 1", tags=[(0, "needs-gpu")]).copy(),
    notebook("x = 1\nz = 1", "%%needs_gpu\ny = 2", tags=[(1, "needs-gpu")])])
def test_an_edited_cpu_cell_is_stale_on_the_gpu(nb):
    assert not same(nb, "gpu")


def test_a_magic_counts():
    assert not same(notebook("x = 1", "%%needs_gpu 2\ny = 2", tags=[(1, "needs-gpu")]), "gpu")


def test_imports_are_followed():
    reached = fp.modules([ast.parse("from companion import measured, pick_device\ncheck('memory-1', f)")])
    assert {"companion", "companion.report", "companion.device", "companion.exercises.memory"} <= set(reached)
    assert "companion.hardware" not in reached


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "companion", tmp_path / "companion")
    monkeypatch.setattr(fp, "ROOT", tmp_path)
    return tmp_path


def edit(project, old, new, name="report"):
    file = project / f"companion/{name}.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("old, new, stale", [
    ("width=8", "width=9", True),
    ("def strict():", "def strict():\n    # a comment", False),
    ('    """All claims, by id."""', '    """Reworded."""', False)])
def test_a_changed_module_makes_its_chapters_stale(project, old, new, stale):
    nb = notebook("from companion import measured")
    before = fp.fingerprint(nb, "cpu")
    edit(project, old, new)
    assert (fp.fingerprint(nb, "cpu") != before) is stale


def test_a_module_that_is_not_imported_makes_nothing_stale(project):
    nb = notebook("from companion import pick_dtype")
    before = fp.fingerprint(nb, "cpu")
    edit(project, "width=8", "width=9")
    assert fp.fingerprint(nb, "cpu") == before


def runs(name):
    found = shutil.which(name)
    return found and not subprocess.run([found, "-c", ""], capture_output=True).returncode


PYTHONS = [name for name in ("python3.11", "python3.12", "python3.13", "python3.14") if runs(name)]
CODE = '''f"{x!r:>{w}}" "b" f"{x=}"
def f(a, /, b: int = 1, *c, d=2, **e) -> str:
    """Doc."""
    with open(a) as g, g: return lambda: [*c]
class C(metaclass=M): x: int
match a:
    case {"k": [1, *_], **rest} if rest: pass
try: pass
except* ValueError as e: raise
'''


def test_the_same_on_every_python(tmp_path):
    """Runners have other Pythons than the machine that stored the outputs: their trees differ in fields."""
    script = tmp_path / "tree.py"
    script.write_text(
        "import ast, hashlib, sys, types\n"
        "sys.modules['notebooks'] = types.SimpleNamespace(ROOT=0, code_cells=0, is_gpu=0, tags=0)\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "from fingerprint import canonical\n"
        f"print(hashlib.sha256(repr(canonical(ast.parse({CODE!r}))).encode()).hexdigest())\n")
    digests = {subprocess.run([p, "-I", script], check=True, capture_output=True, text=True).stdout.strip()
               for p in [sys.executable, *PYTHONS]}
    assert digests == {"fde771ae86ed5263a22351ef5b40bb25a6cd64da664ea508578013cbeddd4dab"}


@pytest.mark.parametrize("old, new, stale", [
    ('"measured": "report",', '"measured": "report",\n    "new": "report",', False),
    ('"measured": "report",', '"measured": "exercise",', True),
    ("globals()[name] = value", "pass", True)])
def test_a_new_public_name_makes_nothing_stale(project, old, new, stale):
    nb = notebook("from companion import measured")
    before = fp.fingerprint(nb, "cpu")
    edit(project, old, new, "__init__")
    assert (fp.fingerprint(nb, "cpu") != before) is stale


def test_a_changed_data_file_makes_stale_who_names_it(project):
    file = project / "companion/data/results.json"
    file.write_text("1")
    user, other = notebook("read('results.json')"), notebook("read('others.json')")
    before = fp.fingerprint(user, "cpu"), fp.fingerprint(other, "cpu")
    file.write_text("2")
    assert fp.fingerprint(user, "cpu") != before[0] and fp.fingerprint(other, "cpu") == before[1]
