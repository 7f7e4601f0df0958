"""Write the pages that are made from data, before each build of the site.

    tools/pages.py [ROOT]

reads companion/claims.csv, companion/hardware.py, references.csv and the notebooks below
ROOT (default: this checkout), and the runs' records, and writes
_generated/{claims,misstatements,hardware,status,references}.md, the table that intro.md
includes, and what planner.md includes. Needs nbformat only.
"""
import csv
import dataclasses
import html
import importlib.util
import re
import sys
from datetime import datetime
from pathlib import Path

import records
from fingerprint import RUNNERS
from notebooks import ROOT, Refused, code_cells, output_text, read, write_text
from planner_files import planner_pages
from planner_tables import planner_accuracy
from thesis import thesis_markdown

CLAIM_KEYS = ("id", "chapter", "statement", "kind", "status", "band", "misstated", "source")
REFERENCE_KEYS = ("key", "authors", "year", "title", "venue", "url")
RECORD_KEYS = {"chapter": str, "runner": str, "when": str, "device": str, "versions": dict,
               "fingerprint": str, "cells": dict, "seconds": (int, float), "network": str}
STATUSES = {
    "checked": "a cell of the book checks it each time the book is run",
    "cited": "taken from its source, not checked here",
    "withdrawn": "no longer asserted",
}
PRINTED = re.compile(r"^[✓✗] (C\w+)", re.M)
CALLED = re.compile(r"""\bclaim\(\s*["'](C\w+)["']""")
URL = re.compile(r"https?://[^\s<>\"]+[^\s<>\".,;:)]")
DOI = re.compile(r"\bdoi:(10\.[^\s,;]+[^\s,;.)])")
ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")


# --- HTML -------------------------------------------------------------------

def text(value):
    """Escape, and show `code` as code. No blank lines: they would end the HTML block."""
    line = html.escape(" ".join(str(value).split()))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", line)


def link(url, label):
    return f'<a href="{html.escape(url)}">{text(label)}</a>'


def linked(value):
    """Text with its addresses, DOIs and arXiv numbers made into links."""
    places = {**{m: m[0] for m in URL.finditer(value)},
              **{m: f"https://doi.org/{m[1]}" for m in DOI.finditer(value)},
              **{m: f"https://arxiv.org/abs/{m[1]}" for m in ARXIV.finditer(value)}}
    parts, at = [], 0
    for match, url in sorted(places.items(), key=lambda item: item[0].start()):
        parts += [text_keep(value[at:match.start()]), link(url, match[0])]
        at = match.end()
    return "".join([*parts, text_keep(value[at:])]).strip()


def text_keep(value):
    """``text`` that keeps a space at either end, to stand beside a link."""
    left, right = value[:1].isspace(), value[-1:].isspace()
    return " " * left + text(value) + " " * (right and bool(value.strip()))


def table(header, rows, caption):
    """An HTML table that scrolls inside itself; each row's first cell heads it."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{c}</td>" for c in rest) + "</tr>"
        for first, *rest in rows)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">\n'
            f'<table class="table">\n<caption>{text(caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>")


def page(title, *blocks):
    return "\n\n".join([f"# {title}", *blocks]) + "\n"


# --- input ------------------------------------------------------------------

def short(path, root):
    return path.relative_to(root) if path.is_relative_to(root) else path


def rows(path, keys, root):
    """The rows of a CSV file; Refused names the first line that is not as it should be."""
    name = short(path, root)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            if next(reader, None) != list(keys):
                raise Refused(f"{name}: the first line must be {','.join(keys)}")
            found = []
            for values in reader:
                if len(values) != len(keys):
                    raise Refused(f"{name} line {reader.line_num}: {len(values)} values, "
                                  f"not {len(keys)}")
                found.append(dict(zip(keys, values)))
    except FileNotFoundError:
        raise Refused(f"{name} is missing") from None
    except csv.Error as error:
        raise Refused(f"{name} line {reader.line_num}: {error}") from None
    except UnicodeDecodeError:
        raise Refused(f"{name} is not UTF-8 text") from None
    seen = set()
    for row in found:
        first = row[keys[0]]
        if not first or first in seen:
            what = "stands twice" if first else "is empty"
            raise Refused(f"{name}: {keys[0]} {first!r} {what}")
        seen.add(first)
    return found


def claim_rows(root):
    path = root / "companion/claims.csv"
    found = rows(path, CLAIM_KEYS, root)
    for row in found:
        if row["status"] not in STATUSES:
            raise Refused(f"{short(path, root)}: {row['id']} has status {row['status']!r}, "
                          f"not one of {', '.join(STATUSES)}")
    return found


def chapters(root):
    """Chapter name -> its notebook, for those that the book's contents list."""
    contents = (root / "_toc.yml").read_text(encoding="utf-8")
    names = re.findall(r"^\s*- file: chapters/(\w+)", contents, re.M)
    found = {name: read(root / f"chapters/{name}.ipynb") for name in names}
    for name, nb in found.items():
        for cell in code_cells(nb):
            if any(output.output_type == "error" for output in cell.outputs):
                first = cell.source.strip().partition("\n")[0]
                raise Refused(f"chapters/{name}.ipynb stores an error as the output of the cell "
                              f"that begins {first!r}: mend it, then `make execute`")
    return found


def record(chapter, runner):
    """The record of the newest run, or None where there was none."""
    data = records.load(chapter, runner)
    if data is None:
        return None
    name = f"the record of {chapter} on the {runner}"
    for key, kind in RECORD_KEYS.items():
        if not isinstance(data.get(key), kind):
            raise Refused(f"{name}: {key} is {data.get(key)!r}")
    for key, kind in {"compared": int, "failed": int, "skipped": dict}.items():
        if not isinstance(data["cells"].get(key), kind):
            raise Refused(f"{name}: cells.{key} is {data['cells'].get(key)!r}")
    try:
        return {**data, "when": datetime.fromisoformat(data["when"])}
    except ValueError:
        raise Refused(f"{name}: when is {data['when']!r}, not an ISO time") from None


# --- claims -----------------------------------------------------------------

def claims_by_cell(cells):
    """Give each claim id one index of ``cells``, pairs (code, output text), in order.

    A cell that printed the claim wins over one that only calls it.
    """
    where = {}
    for index, (_, output) in enumerate(cells):
        for id in PRINTED.findall(output):
            where.setdefault(id, index)
    for index, (code, _) in enumerate(cells):
        for id in CALLED.findall(code):
            where.setdefault(id, index)
    return where


def cells_of_claims(notebooks):
    """Claim id -> address of the cell that checks it, relative to a generated page."""
    where = {}
    for chapter, nb in notebooks.items():
        cells = [(c.source, output_text(c)) for c in code_cells(nb)]
        for id in claims_by_cell(cells):
            where.setdefault(id, f"../chapters/{chapter}.html#claim-{id}")
    return where


def where_checked(row, where):
    if row["status"] == "checked" and row["id"] in where:
        return link(where[row["id"]], f"the cell that checks {row['id']}")
    return ""


def claim_item(row, where):
    """One claim as a list item: its id is the address of the item."""
    id, status = row["id"], row["status"]
    notes = [(label, linked(row[key])) for label, key in
             (("Asserted", "band"), ("Often misstated as", "misstated"), ("Source", "source"))
             if row[key].strip()]
    if checked := where_checked(row, where):
        notes.insert(0, ("Checked by", checked))
    notes = "".join(f"<dt>{label}</dt><dd>{value}</dd>" for label, value in notes)
    return (f'<li id="{id}"><p class="claim-head"><a href="#{id}">{id}</a> '
            f'<span class="status status-{status}">{status}</span> '
            f'{text(row["kind"])}, {text(row["chapter"])}</p>'
            f'<p>{text(row["statement"])}</p>' + (f"<dl>{notes}</dl>" if notes else "") + "</li>")


def claims_page(claims, where):
    counts = [(f"<strong>{status}</strong>", sum(r["status"] == status for r in claims), meaning)
              for status, meaning in STATUSES.items()]
    items = "\n".join(claim_item(row, where) for row in claims)
    return page(
        "Claims",
        "What the book asserts. A checked claim leads to the cell that checks it; "
        "that cell's code says how, and its output starts with ✓ and the claim's id.",
        table(("Status", "Claims", "Meaning"), counts, f"{len(claims)} claims"),
        '<p class="claim-filter" hidden><label for="claim-filter">Show only claims with</label>\n'
        '<input id="claim-filter" type="search" autocomplete="off">\n'
        '<output for="claim-filter"></output></p>',
        f'<ul class="claims">\n{items}\n</ul>')


def misstatements_page(claims, where):
    items = "\n".join(
        f'<li id="{row["id"]}"><p class="misstated"><span class="said">Often said:</span> '
        f'{text(row["misstated"])}</p><p><span class="said">Rather:</span> '
        f'{text(row["statement"])}</p><p class="claim-head">'
        f'<a href="claims.html#{row["id"]}">{row["id"]}</a>'
        + (f", {checked}" if (checked := where_checked(row, where)) else "") + "</p></li>"
        for row in claims if row["misstated"].strip() and row["status"] != "withdrawn")
    return page(
        "Misstatements",
        "What is often said about the book's subject, and what holds instead.",
        f'<ul class="claims">\n{items}\n</ul>' if items else "None is listed yet.")


# --- hardware ---------------------------------------------------------------

def load_hardware(root):
    path = root / "companion/hardware.py"
    if not path.is_file():
        raise Refused(f"{short(path, root)} is missing")
    spec = importlib.util.spec_from_file_location("hardware_of_the_book", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its own module up
    spec.loader.exec_module(module)
    return module


def scale(unit, largest):
    """The unit a column is shown in, and how many of ``unit`` it is."""
    if unit in ("FLOP/s", "op/s"):
        return f"T{unit}", 1e12
    if unit == "bytes/s":
        return "GB/s", 1e9
    if unit == "bytes":
        return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    return unit, 1


def cell_value(value, factor):
    if value is None or value == ():
        return "–"
    if isinstance(value, float) or factor != 1:
        return f"{value / factor:,.4g}" if value / factor < 1e4 else f"{value / factor:,.0f}"
    if isinstance(value, (tuple, list)):
        return text((", " if isinstance(value[0], str) else ".").join(map(str, value)))
    return text(value)


def hardware_table(gpus, fields, caption):
    """A row per device, a column per field in one unit, so that a column can be compared."""
    header, columns = ["GPU"], [map(text, gpus)]
    for field in fields:
        values = [getattr(gpu, field.name) for gpu in gpus.values()]
        numbers = [v for v in values if isinstance(v, (int, float))]
        unit, factor = scale(field.metadata.get("unit", ""), max(numbers, default=0))
        label = text(field.metadata.get("label", field.name))
        header.append(label + (f' <span class="unit">{text(unit)}</span>' if unit else ""))
        columns.append([cell_value(v, factor) for v in values])
    return table(header, zip(*columns), caption)


def hardware_page(gpus):
    """Tables by kind of unit, then each device's source and notes."""
    apart = ("name", "source", "notes")
    fields = [f for f in dataclasses.fields(next(iter(gpus.values()))) if f.name not in apart]
    unit = {f: f.metadata.get("unit", "") for f in fields}
    plain = [f for f in fields if not unit[f]]
    rates = [f for f in fields if unit[f] in ("FLOP/s", "op/s")]
    sources = "\n".join(
        f"<li><strong>{text(name)}</strong>: {link(gpu.source, 'source')}. {text(gpu.notes)}</li>"
        for name, gpu in gpus.items())
    return page(
        "Hardware",
        "What the chapters compute with: dense peak rates, links per direction, decimal GB and "
        "binary GiB apart. A peak is an upper bound; the chapters measure how near one gets. "
        "A dash: the device has none, or its maker publishes none.",
        "## Devices", hardware_table(gpus, plain, "Devices"),
        "## Peak rates", hardware_table(gpus, rates, "Peak rates"),
        "## Memory, links and power",
        hardware_table(gpus, [f for f in fields if f not in plain + rates], "Memory, links, power"),
        "## Sources and notes", f"<ul>\n{sources}\n</ul>")


# --- status -----------------------------------------------------------------

def skipped(reasons):
    return "; ".join(f"{n}: {text(why)}" for why, n in sorted(reasons.items()) if n) or "0"


def status_column(chapter, runner, nb):
    """What one runner last saw of a chapter, from top to bottom of its column."""
    word, reason = records.state(chapter, runner, nb)
    state = f'<span class="status status-{word.partition(" ")[0]}">{word}</span> {text(reason)}'
    run = record(chapter, runner)
    if run is None:
        return [state, *[""] * (len(STATUS_ROWS) - 1)]
    versions = ", ".join(f"{text(k)} {text(v)}" for k, v in sorted(run["versions"].items()))
    return [state, f'{run["when"]:%Y-%m-%d %H:%M} UTC', text(run["device"]), versions,
            run["cells"]["compared"], run["cells"]["failed"], skipped(run["cells"]["skipped"]),
            f'{run["seconds"]:.0f} s', text(run["network"])]


STATUS_ROWS = ("Is it the code on the page?", "Last run", "Device", "Versions", "Cells compared",
               "Cells that differed", "Cells skipped", "Took", "Network")


def status_page(notebooks):
    blocks = []
    for chapter, nb in notebooks.items():
        columns = [status_column(chapter, runner, nb) for runner in RUNNERS]
        blocks += [f"## [{chapter}](../chapters/{chapter}.ipynb)",
                   table(("", *(r.upper() for r in RUNNERS)), zip(STATUS_ROWS, *columns),
                         f"Last runs of {chapter}")]
    return page(
        "Status",
        "Each chapter is run again on a CPU and on a GPU, and every output is compared with "
        "the one on its page. **Fresh** means that the code has not changed since; **stale**, "
        "that it has. Rewording text or comments makes nothing stale.",
        *blocks)


# --- references -------------------------------------------------------------

def references_page(references):
    items = "\n".join(
        f'<li id="{html.escape(r["key"])}">{text(r["authors"])} ({text(r["year"])}). '
        + (link(r["url"], r["title"]) if r["url"].strip() else f'<cite>{text(r["title"])}</cite>')
        + f'. {text(r["venue"])}</li>'
        for r in references)
    return page("References", "The sources behind the chapters and the claims.",
                f'<ul class="references">\n{items}\n</ul>')


# --- all --------------------------------------------------------------------

def pages(root):
    """Page name -> its text. Raises Refused for input that a person must mend."""
    notebooks = chapters(root)
    claims = [row for row in claim_rows(root) if row["chapter"] in notebooks]  # of what can be read
    where = cells_of_claims(notebooks)
    intro = root / "intro.md"
    front = intro.is_file() and "_generated/thesis.md" in intro.read_text(encoding="utf-8")
    return {
        **({"thesis": thesis_markdown(claims)} if front else {}),
        **({**planner_pages(root), "planner_accuracy": planner_accuracy(root, table)}
           if (root / "planner.md").is_file() else {}),
        "claims": claims_page(claims, where),
        "misstatements": misstatements_page(claims, where),
        "hardware": hardware_page(load_hardware(root).GPUS),
        "status": status_page(notebooks),
        "references": references_page(rows(root / "references.csv", REFERENCE_KEYS, root)),
    }


def main(root=ROOT):
    root = Path(root).resolve()
    try:
        for name, content in pages(root).items():
            path = root / "_generated" / f"{name}.md"
            if not path.exists() or path.read_text(encoding="utf-8") != content:
                write_text(path, content)  # an unchanged page keeps its time: warm builds
    except Refused as refused:
        sys.exit(f"pages: {refused}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
