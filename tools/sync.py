"""Bring each chapter's notebook up to its text: one way, keeping outputs and cell ids.

    sync.py [--discard] [CHAPTER...]

The text (chapters/<name>.md) is the only edited source. A notebook that was edited
by hand is refused, so that the edit is not lost; --discard drops it.
"""
import hashlib
import re
import sys
import tomllib

import jupytext
import yaml
from jupytext.combine import combine_inputs_with_outputs
from nbformat import from_dict

from notebooks import CHAPTERS, ROOT, Refused, code_cells, pick, read, write, write_text

KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}
_SETUP_TEXT = '''\
# Set-up: installs the book's helper package where it is missing, as in Colab
import importlib.metadata, subprocess, sys

try:
    ready = importlib.metadata.version("{name}") == "{version}"
except importlib.metadata.PackageNotFoundError:
    ready = False
if not ready:  # --no-deps: torch and numpy stay as they are
    source = "git+{url}@v{version}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", source]
    if subprocess.run(pip).returncode:
        raise RuntimeError(f"could not install {{source}}: is there a network?")'''
_SETUP_CELL = re.compile(r"(```\{code-cell\}[^\n]*\n:tags: \[[^\]\n]*\bsetup\b[^\]\n]*\]\n\n).*?(\n```)", re.S)


def repository():
    """The repository's address, from the one place that holds it."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]


def setup_cell():
    """The source of every chapter's first code cell."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _SETUP_TEXT.format(name=project["name"], version=project["version"], url=repository())


def read_text(path):
    """The cells of a chapter's text; Refused if they cannot be read."""
    try:
        nb = jupytext.read(path)
    except Exception as error:
        raise Refused(f"chapters/{path.name}: {' '.join(str(error).split())}. Mend the cell's header") from None
    if not code_cells(nb):
        raise Refused(f"chapters/{path.name} has no code cells: does it begin with the jupytext header?")
    return nb


def sources_digest(nb):
    """A hash of all cells' sources and metadata: tells whether a notebook was edited by hand."""
    cells = [(c.cell_type, c.source, sorted(c.metadata.items(), key=repr)) for c in nb.cells]
    return hashlib.sha256(repr(cells).encode()).hexdigest()[:16]


def _refresh_claims(nb):
    """Statements shown behind a tick follow claims.csv: rewording one makes nothing stale."""
    sys.path.insert(0, str(ROOT))
    from companion.report import claims
    for cell in code_cells(nb):
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = re.sub(
                    r"^(\u2713 (\S+)) .*$",
                    lambda m: f"{m[1]} {claims()[m[2]].statement}" if m[2] in claims() else m[0],
                    output.text, flags=re.M)


def synced(name, discard=False):
    """The notebook that chapter ``name``'s text and stored outputs make together."""
    text_path, path = CHAPTERS / f"{name}.md", CHAPTERS / f"{name}.ipynb"
    nb = read_text(text_path)
    if path.is_file():
        old = read(path)
        marked = old.metadata.get("companion", {}).get("text")
        if not discard and marked is not None and marked != sources_digest(old):
            raise Refused(f"chapters/{name}.ipynb was edited by hand. Move the edit to chapters/{name}.md, "
                          "then `make sync DISCARD=1` (it drops the notebook's own edits, not its outputs)")
        nb = combine_inputs_with_outputs(nb, old, fmt={"extension": ".ipynb"})
        kept = dict(old.metadata.get("companion", {}))
    else:
        kept = {}
    for cell in nb.cells:
        cell.metadata.pop("lines_to_next_cell", None)
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata = _metadata(nb, kept)
    _refresh_claims(nb)
    return nb


def _metadata(nb, kept):
    return from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"},
                      "companion": {**kept, "text": sources_digest(nb)}})


def write_setup_cell(name):
    """Put the current set-up cell into the text: its version and address come from elsewhere."""
    path = CHAPTERS / f"{name}.md"
    old = path.read_text(encoding="utf-8")
    new, count = _SETUP_CELL.subn(lambda m: m[1] + setup_cell() + m[2], old, count=1)
    if not count:
        raise Refused(f"chapters/{name}.md: no code cell tagged `setup`; the first code cell must be one")
    if new != old:
        write_text(path, new)


def main(argv):
    discard = "--discard" in argv
    unknown = [a for a in argv if a.startswith("-") and a != "--discard"]
    if unknown:
        raise Refused(f"no such option: {unknown[0]}. Usage: sync.py [--discard] [CHAPTER ...]")
    for name in pick([a for a in argv if not a.startswith("--")]):
        write_setup_cell(name)
        nb = synced(name, discard)
        path = CHAPTERS / f"{name}.ipynb"
        if not path.is_file() or nb != read(path):
            write(nb, path)
            print(f"synced chapters/{name}.ipynb")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"sync: {refused}")
