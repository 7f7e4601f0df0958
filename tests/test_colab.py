"""The book as a reader of Colab meets it: the set-up cell in a fresh runtime, and a T4.

The set-up cell really installs here: from a git repository on this disk, into an environment
that sees this one's torch and numpy but no companion. A T4 (compute capability 7.5, no bf16
units, no working Triton) is simulated as far as a machine without one allows.
"""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv

import pytest

import sync
from notebooks import ROOT
from notebooks import CHAPTERS, chapter_names, code_cells, is_gpu
from t4 import on_a_t4

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME, VERSION = PROJECT["name"], PROJECT["version"]
CHAPTERS_HERE = [name for name in chapter_names() if (CHAPTERS / f"{name}.ipynb").is_file()]


# The set-up cell

@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository with the package at two tags: an older version and today's."""
    if not shutil.which("git"):
        pytest.skip("needs git, as pip does to install from a repository")
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "companion", folder / "companion", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    text = (ROOT / "pyproject.toml").read_text()
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], check=True)
    for version in ("0.0.1", VERSION):
        (folder / "pyproject.toml").write_text(text.replace(f'version = "{VERSION}"', f'version = "{version}"'))
        for command in (["add", "-A"], ["commit", "-qm", version], ["tag", f"v{version}"]):
            subprocess.run([*git, *command], check=True)
    return f"file://{folder}"


class Runtime:
    """A fresh Python environment: this one's packages, without companion."""

    def __init__(self, folder):
        venv.create(folder / "env", with_pip=False)
        self.python, self.folder = folder / "env/bin/python", folder / "content"
        self.folder.mkdir()
        site = next((folder / "env").glob("lib/python*/site-packages"))
        (site / "colab.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, code, before=(), **environment):
        # PIP_NO_BUILD_ISOLATION, which pip reads backwards: setuptools is here already, and fetching
        # it again would need a network.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COMPANION", "PIP_"))}
        return subprocess.run([*before, self.python, "-c", code], cwd=self.folder, capture_output=True, text=True,
                              env={**clean, "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                                   "HOME": str(self.folder), **environment})

    def packages(self):
        """Name -> version of all that this environment sees, companion's included."""
        done = self.run("import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))")
        return json.loads(done.stdout)


@pytest.fixture
def runtime(tmp_path):
    return Runtime(tmp_path)


@pytest.fixture
def cell(repository, monkeypatch):
    monkeypatch.setattr(sync, "repository", lambda: repository)
    return sync.setup_cell()


def test_the_cell_installs_the_package_alone(runtime, cell):
    before = runtime.packages()
    assert NAME not in before and "torch" in before and "numpy" in before
    # In one process, as in a notebook: after the cell, the package can be imported.
    done = runtime.run(cell + "\nimport companion\nprint(companion.__file__)")
    assert done.returncode == 0, done.stderr
    assert str(runtime.folder.parent / "env") in done.stdout
    assert runtime.packages() == {**before, NAME: VERSION}  # torch, numpy and all others as they were


def test_the_cell_does_nothing_where_the_version_is_right(runtime, cell):
    assert runtime.run(cell).returncode == 0
    done = runtime.run(cell, PATH="/nowhere")  # no git, so an install would fail
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_cell_replaces_another_version(runtime, cell):
    assert runtime.run(cell.replace(VERSION, "0.0.1")).returncode == 0
    assert runtime.packages()[NAME] == "0.0.1"
    before = runtime.packages()
    assert runtime.run(cell).returncode == 0
    assert runtime.packages() == {**before, NAME: VERSION}


@pytest.mark.parametrize("options", [["--no-deps"], []])
def test_pip_would_install_nothing_else(runtime, repository, options):
    """Even without --no-deps the package asks for nothing: it cannot replace a reader's torch."""
    command = ["pip", "install", "--dry-run", "-q", "--report", "-", *options, f"git+{repository}@v{VERSION}"]
    done = runtime.run(f"import runpy, sys; sys.argv = {command!r}; runpy.run_module('pip', run_name='__main__')")
    assert [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]] == [NAME], done.stderr


@pytest.mark.parametrize("wrong", ["address", "tag"])
def test_a_repository_that_cannot_be_reached_is_one_clear_error(runtime, cell, repository, wrong):
    broken = cell.replace(repository, repository + "-gone") if wrong == "address" else cell.replace(f'@v{VERSION}"', '@v9.9.9"')
    assert broken != cell
    done = runtime.run(broken)
    assert done.returncode and done.stderr.splitlines()[-1].startswith("RuntimeError: could not install git+file://")
    assert done.stderr.rstrip().endswith("is there a network?") and NAME not in runtime.packages()


CUT = ["unshare", "--map-root-user", "--net"]


@pytest.mark.skipif(not shutil.which("unshare") or subprocess.run([*CUT, "true"], capture_output=True).returncode != 0,
                    reason="this machine lets no process cut its own network")
def test_without_a_network_the_real_address_is_one_clear_error(runtime):
    done = runtime.run(sync.setup_cell(), CUT)
    last = done.stderr.splitlines()[-1]
    assert last == f"RuntimeError: could not install git+{sync.repository()}@v{VERSION}: is there a network?"


# A T4

@pytest.mark.parametrize("name", CHAPTERS_HERE)
def test_every_untagged_cell_runs_on_a_t4_without_triton(name, tmp_path):
    """Tensors stay on the CPU: what is tried is imports and choices by capability. `make test-t4` on a GPU tries the rest."""
    cells = code_cells(sync.read_text(CHAPTERS / f"{name}.md"))[1:]  # without the set-up cell
    assert on_a_t4([c.source for c in cells if not is_gpu(c)], tmp_path)[0] == "all ran"


@pytest.mark.parametrize("source, message", [
    ("import triton", "code cell 1 failed: .*triton"),
    ("import torch\nif torch.cuda.get_device_capability() < (8, 0): raise SystemError('needs sm_80')", "cell 1 .*needs sm_80")])
def test_a_cell_that_a_t4_cannot_run_is_seen(source, message, tmp_path):
    assert re.search(message, on_a_t4(["x = 1", source], tmp_path)[0])


# bf16 in GPU cells: a static rule

GUARD = ("get_device_capability", "pick_dtype")


def _names(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


class _Bf16(ast.NodeVisitor):
    """Walks a cell; ``found`` gets the line of each use of bfloat16 that no test of the capability guards.

    functions: name -> definition of each function and class, of this cell and of earlier ones. One
    counts where it is used: its body is walked, once, when it is named outside a guard.
    """

    def __init__(self, functions):
        self.functions, self.found, self.guards, self.seen, self.guarded = functions, [], set(GUARD), set(), False

    def within(self, nodes, guarded):
        before, self.guarded = self.guarded, self.guarded or guarded
        for node in nodes:
            self.visit(node)
        self.guarded = before

    def visit_If(self, node):
        guarded = bool(_names(node.test) & self.guards)
        self.within([node.test], guarded)
        for branch in (node.body, node.orelse):
            self.within(branch if isinstance(branch, list) else [branch], guarded)

    visit_IfExp = visit_If

    def visit_Assign(self, node):
        if _names(node.value) & self.guards and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            self.guards |= {t.id for t in node.targets if isinstance(t, ast.Name)}  # capable = ... >= (8, 0)
            return
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        pass  # it counts where it is used

    visit_ClassDef = visit_FunctionDef

    def visit_Attribute(self, node):
        if node.attr == "bfloat16" and not self.guarded:
            self.found.append(node.lineno)
        self.generic_visit(node)

    def visit_Name(self, node):
        definition = self.functions.get(node.id)
        if definition is not None and not self.guarded and node.id not in self.seen:
            self.seen.add(node.id)
            for part in definition.body if isinstance(definition, ast.ClassDef) else [definition]:
                self.within(part.body if isinstance(part, ast.FunctionDef) else [part], False)

    def visit_Call(self, node):
        definition = self.functions.get(getattr(node.func, "id", None))
        if isinstance(definition, ast.FunctionDef):
            self.within(_defaults_left(definition, node), False)
        self.generic_visit(node)


def _defaults_left(definition, call):
    """The default values that ``call`` of a function leaves as they are."""
    a = definition.args
    positional = [*a.posonlyargs, *a.args]
    pairs = [*zip(reversed(positional), reversed(a.defaults)), *zip(a.kwonlyargs, a.kw_defaults)]
    given = {p.arg for p in positional[: len(call.args)]} | {k.arg for k in call.keywords}
    spread = None in given or any(isinstance(argument, ast.Starred) for argument in call.args)
    return [] if spread else [value for parameter, value in pairs if value is not None and parameter.arg not in given]


def bf16_findings(cells):
    """(number, lines) of GPU cells that use bfloat16 whatever the GPU can do. cells: (source, is_gpu) pairs."""
    functions, findings = {}, []
    for number, (source, gpu) in enumerate(cells):
        tree = ast.parse(re.sub(r"^[ \t]*[%!].*$", "pass", source, flags=re.M))
        functions |= {n.name: n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        if gpu:
            visitor = _Bf16(functions)
            visitor.visit(tree)
            if visitor.found:
                findings.append((number, sorted(set(visitor.found))))
    return findings


@pytest.mark.parametrize("name", chapter_names())
def test_gpu_cells_use_bf16_only_where_the_gpu_has_it(name):
    """Mend with ``pick_dtype()``, or with a test of ``torch.cuda.get_device_capability()`` around the use."""
    cells = [(c.source, is_gpu(c)) for c in code_cells(sync.read_text(CHAPTERS / f"{name}.md"))]
    assert bf16_findings(cells) == []


GUARDED = """
capable = torch.cuda.get_device_capability() >= (8, 0)
def multiply():
    return x.bfloat16() @ x.bfloat16()
if capable:
    multiply()
"""
EARLIER = "def build(device, half=torch.bfloat16):\n    return torch.ones(1, device=device).to(half)\n"


@pytest.mark.parametrize("source, found", [
    ("x = torch.ones(1, device='cuda', dtype=torch.bfloat16)", True),
    ("x = torch.ones(1).cuda().bfloat16()", True),
    ("with torch.autocast('cuda', dtype=torch.bfloat16):\n    y = x @ x", True),
    ("def f():\n    return x.bfloat16()\nf()", True),
    ("def f():\n    return x.bfloat16()\nprint(*map(f, range(2)))", True),
    ("class M:\n    def __init__(self):\n        self.w = x.bfloat16()\nM()", True),
    ("if torch.cuda.is_bf16_supported():\n    x = x.bfloat16()", True),  # a T4 answers yes
    ("if n > 4:\n    x = x.bfloat16()", True),
    ("build('cuda')", True),
    ("build('cuda', torch.float16)", False), ("build('cuda', half=pick_dtype())", False),
    ("x = torch.ones(1, device='cuda', dtype=pick_dtype())", False),
    ("def f():\n    return x.bfloat16()", False),  # never called here
    ("if torch.cuda.get_device_capability() >= (8, 0):\n    x = x.bfloat16()", False),
    ("half = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16", False),
    ("if pick_dtype() == torch.bfloat16:\n    x = x.bfloat16()", False),
    (GUARDED, False), (GUARDED.replace("if capable:", "if True:"), True)])
def test_the_bf16_rule_itself(source, found):
    assert bool(bf16_findings([(EARLIER, False), ("%%needs_gpu\n" + source, True)])) is found
    assert bf16_findings([(EARLIER, False), (source, False)]) == []  # on a CPU bf16 is right
