"""Sphinx extension of the book: ids and links for claims, and lighter pages.

A code cell that prints ``✓ C017`` (or, before its first run, calls ``claim("C017", ...)``)
gets the HTML id ``claim-C017``; its printed line links back to the claims page.
"""
import re
import zlib
from pathlib import Path

from docutils import nodes

import planner_files
from pages import claims_by_cell

CLAIMS_PAGE = "_generated/claims"
TEXT = re.compile(r">[^<>]+<")  # HTML text between two tags, never an attribute
MEASURED = re.compile("\u2039[^\u203a\n]*\u203a")
CLAIM_LINE = re.compile(r"^([✓✗] (C\w+))(.*)$", re.M)


def _part(cell, name):
    return "\n".join(n.astext() for n in cell.children if n.get("nb_element") == name)


def _cells(doctree):
    return [n for n in doctree.findall(nodes.container) if n.get("nb_element") == "cell_code"]


def name_folded_cells(app, doctree):
    """A folded solution says so; other folded cells are just code."""
    for cell in _cells(doctree):
        what = "the solution" if "tag_solution" in cell["classes"] else "the code"
        cell["prompt_show"], cell["prompt_hide"] = f"Show {what}", f"Hide {what}"


def say_what_never_ran(app, doctree):
    """A GPU cell that never ran says so, instead of looking as if it printed nothing."""
    for cell in _cells(doctree):
        if "tag_needs-gpu" in cell["classes"] and cell.get("exec_count") is None:
            note = nodes.paragraph("", "", nodes.emphasis("", "This cell has not run on a GPU yet."))
            note["classes"].append("never-run")
            cell += note


def add_claim_ids(app, doctree):
    """Put ``claim-<id>`` on the container of the cell that checks the claim."""
    cells = _cells(doctree)
    texts = [(_part(n, "cell_code_source"), _part(n, "cell_code_output")) for n in cells]
    for id, index in claims_by_cell(texts).items():
        cells[index]["ids"].append(f"claim-{id}")


def _mark(text, claims_uri):
    text = MEASURED.sub(r'<span class="measured">\g<0></span>', text)
    return CLAIM_LINE.sub(
        rf'<span class="claim-line"><a href="{claims_uri}#\2">\1</a>\3</span>', text)


def mark_page(app, pagename, templatename, context, doctree):
    """Wrap measured numbers and claim lines, so that the style sheet can show them."""
    if doctree is None or pagename.startswith("_generated/"):
        return
    uri = app.builder.get_relative_uri(pagename, CLAIMS_PAGE)
    context["body"] = TEXT.sub(
        lambda match: ">" + _mark(match[0][1:-1], uri) + "<", context["body"])


def lighter(app, pagename, templatename, context, doctree):
    """Leave out live code, which is off but names a server, and what this page does not use."""
    users = {"mathjax": 'class="math', "planner": 'class="planner'}
    body = context.get("body", "")
    unused = ["thebe"] + [name for name, sign in users.items() if sign not in body]
    for kind in ("script_files", "css_files"):
        context[kind] = [f for f in context[kind] if not any(u in _source(f) for u in unused)]


def _source(file):
    """Address and inline text of a script or style sheet, in lower case."""
    body = getattr(file, "attributes", {}).get("body") or ""
    return f"{getattr(file, 'filename', None) or file} {body}".lower()


def only_own_scripts(app, config):
    """Jupyter Book puts every script below _static on every page: MathJax too."""
    config.html_js_files = [f for f in config.html_js_files if "/" not in str(f)]


def ship_planner(app, error):
    """The planner's page runs the package's own files."""
    if error is None and (Path(app.srcdir) / "planner.md").is_file():
        planner_files.copy(Path(app.outdir), Path(app.srcdir))


def setup(app):
    app.connect("config-inited", only_own_scripts)
    app.connect("doctree-read", add_claim_ids)
    app.connect("doctree-read", name_folded_cells)
    app.connect("doctree-read", say_what_never_ran)
    app.connect("html-page-context", mark_page)
    app.connect("html-page-context", lighter, priority=900)
    app.connect("build-finished", ship_planner)
    return {"version": "1", "env_version": zlib.crc32(Path(__file__).read_bytes()),  # rebuild all
            "parallel_read_safe": True, "parallel_write_safe": True}
