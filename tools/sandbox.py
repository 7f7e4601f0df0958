"""Where notebooks run: an empty folder, the built wheel, nothing of the checkout near."""
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from notebooks import ROOT, Refused

# The same for storing outputs and for comparing them.
_ENVIRONMENT = {
    "COMPANION_STRICT": "1",           # a missed band is an error
    "OMP_WAIT_POLICY": "passive",      # idle threads must not spin on a small machine,
    "OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1)),  # nor wake in dozens for small tensors
    "PYTEST_CURRENT_TEST": "chapters", # ipykernel then captures output as it does under nbval
    "TQDM_DISABLE": "1",
    "IPY_TEST_SIMPLE_PROMPT": "1",
}
_DROPPED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONSTARTUP", "PYTHONHASHSEED", "MPLBACKEND", "COVERAGE_PROCESS_START")


def build_wheel(folder):
    """Build the package's wheel into ``folder`` without a network; return its path."""
    with tempfile.TemporaryDirectory() as source:  # building leaves files beside its source
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "companion", Path(source) / "companion",
                        ignore=shutil.ignore_patterns("__pycache__"))
        build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
        done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"the wheel of companion cannot be built:\n{done.stderr.strip()}")
    return next(Path(folder).glob("*.whl"))


@contextlib.contextmanager
def sandbox():
    """An empty temporary folder; kernels started inside import the built wheel.

    Packages that this interpreter finds through its own PYTHONPATH (as on a runner
    without a network) stay importable. All is removed at the end, also on Ctrl-C.
    """
    before, cwd = dict(os.environ), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="chapter-") as folder:
        site = Path(folder) / "site"
        with zipfile.ZipFile(build_wheel(folder)) as wheel:
            wheel.extractall(site)
        extra = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
        for name in _DROPPED:
            os.environ.pop(name, None)
        os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join([str(site), *extra]),
                          IPYTHONDIR=str(Path(folder) / "ipython"))
        work = Path(folder) / "work"
        work.mkdir()
        os.chdir(work)
        try:
            yield work
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def empty_folder(work):
    """A new empty folder inside the sandbox, one a notebook."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        yield Path(folder)
