"""How a cell shows a number that another machine would print differently.

``measured`` wraps it in markers, which the comparison blanks; ``claim`` states
what must hold all the same. Exact output needs neither: it is printed.
"""
import csv
import difflib
import functools
import os
from dataclasses import dataclass
from importlib import resources

OPEN, CLOSE = "\u2039", "\u203a"  # ‹ ›


def strict():
    """True where the book is checked (``COMPANION_STRICT=1``), not read."""
    return os.environ.get("COMPANION_STRICT") == "1"


def measured(x, spec=None, width=8):
    """``measured(0.877, ".3f")`` -> ``'‹   0.877›'``: a number only this machine saw.

    x: a number, a 0-d tensor or a string; spec: a format specification, by
    default ``.3g`` for numbers; width: characters between the markers. Fixed,
    because a wider number would move the columns of a table around it.

    Raises ValueError for text that holds a marker or a line break and, where
    the book is checked, for text wider than ``width``.
    """
    if hasattr(x, "item"):
        x = x.item()
    text = format(x, ("" if isinstance(x, str) else ".3g") if spec is None else spec)
    if any(c in text for c in (OPEN, CLOSE, "\n")):
        raise ValueError(f"measured: {text!r} holds a marker or a line break")
    if len(text) > width and strict():
        raise ValueError(f"measured: {text!r} needs width={len(text)}, not {width}")
    return f"{OPEN}{text:>{width}}{CLOSE}"


@dataclass(frozen=True)
class Claim:
    """One row of ``claims.csv``: what the book asserts, and how far it is checked."""
    id: str
    chapter: str
    statement: str
    kind: str        # exact, theorem, experiment, hardware, history or opinion
    status: str      # checked (by a cell), cited (by a source) or withdrawn
    band: str        # what the cell asserts, where it was seen, what it would catch
    misstated: str   # the common misstatement, if there is one
    source: str


class ClaimFailed(AssertionError):
    """A claim of the book did not hold where the book is checked."""


@functools.cache
def claims():
    """All claims, by id."""
    text = resources.files("companion").joinpath("claims.csv").read_text(encoding="utf-8")
    return {row["id"]: Claim(**row) for row in csv.DictReader(text.splitlines())}


def claim(id, holds, seen=None):
    """Assert claim ``id`` of ``claims.csv`` and print ``✓`` with its statement.

    holds: a bool (numpy's and 0-d tensors too); seen: the value behind it, for
    the message when it does not hold. Then the book's own runs raise
    ClaimFailed, and a reader gets a line that says what was seen elsewhere.

    Raises ValueError for an unknown id, for one that no cell should check, and
    for a ``holds`` that is not a truth value.
    """
    row = claims().get(id)
    if row is None:
        near = difflib.get_close_matches(str(id), claims(), n=3)
        raise ValueError(f"claim: no {id!r} in claims.csv" + (f"; near: {', '.join(near)}" if near else ""))
    if row.status != "checked":
        raise ValueError(f"claim: {id} is {row.status} in claims.csv, so no cell may check it")
    if hasattr(holds, "item"):
        holds = holds.item()
    if not isinstance(holds, bool):
        raise ValueError(f"claim: {id} needs True or False, got {holds!r}")
    if holds:
        print(f"\u2713 {id} {row.statement}")
        return
    saw = "" if seen is None else f" Seen here: {seen}."
    if strict():
        raise ClaimFailed(f"{id} does not hold here: {row.statement}{saw} Asserted: {row.band}")
    print(f"\u2717 {id} did not hold on this machine: {row.statement}{saw}\n  Elsewhere: {row.band}")
