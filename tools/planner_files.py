"""The Python files that the planner's page runs, and what of that page is made at build.

They are shipped as they lie in companion/: the page answers with the very files that the
package holds. ``book_ext`` copies them into the site, ``pages`` writes the form and the
worked examples.
"""
import hashlib
import shutil
import sys

from notebooks import ROOT

PLACE = "_static/companion"
RUNTIME = ("pyodide.asm.wasm", "python_stdlib.zip")  # the large files of _static/pyodide


def names(root=ROOT):
    """The files, relative to companion/: the planner's modules, what they import, their data."""
    modules = sorted(p.name for p in (root / "companion").glob("planner*.py"))
    return ["__init__.py", "memory.py", "hardware.py", *modules, "data/models.csv"]


def version(root=ROOT):
    """Changes with any byte of them: it is added to their addresses, against stale caches."""
    digest = hashlib.sha256()
    scripts = [root / "_static" / f"planner{end}.mjs" for end in ("", "_worker")]
    for path in [*(root / "companion" / name for name in names(root)), *scripts]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def megabytes(root=ROOT):
    """Of what the page's script counts when it is first used, unpacked."""
    files = [root / "_static/pyodide" / name for name in RUNTIME]
    files += [root / "companion" / name for name in names(root)]
    return sum(path.stat().st_size for path in files) / 1e6


def copy(site, root=ROOT):
    """Put the files into the built site."""
    for name in names(root):
        target = site / PLACE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / "companion" / name, target)


def planner_pages(root=ROOT):
    """{name of a generated page: text}. Text made of the same files is not made again."""
    now = version(root)
    stamp = f"<!-- made from {now} -->\n"
    old = {n: root / "_generated" / f"{n}.md" for n in ("planner_form", "planner_examples")}
    texts = {n: p.read_text(encoding="utf-8") for n, p in old.items() if p.is_file()}
    if len(texts) == len(old) and all(t.startswith(stamp) for t in texts.values()):
        return texts
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from companion import planner_page
    form = planner_page.form_html(" ".join(names(root)), now, megabytes(root))
    return {"planner_form": stamp + form + "\n",
            "planner_examples": stamp + planner_page.examples_html()}
