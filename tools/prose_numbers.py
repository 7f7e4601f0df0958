"""Which numbers with a unit in a chapter's prose have nothing behind them.

A number is supported if a cell printed it unmarked, if it is a literal in a code cell (then
also times a thousand, a million...: 7 GB beside 7e9), if it stands in an exercise,
or if its sentence carries a source link. Formulas and inline code are not prose.
"""
import ast
import re

from notebooks import code_cells, output_text

_UNIT = (r"[kKMGT]i?B\b(?:/s)?|bytes?\b|bits?\b|%|percent\b|[MGTP]?FLOPs?(?:/s)?\b|[mµun]?s\b|seconds?\b|minutes?\b|hours?\b|"
         r"days?\b|tokens?(?:/s)?\b|parameters?\b|params\b|layers?\b|GPUs?\b|times\b|x\b|W\b|watts?\b|[BM]\b|"
         r"million\b|billion\b|GHz\b|°C\b")
_NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e\d+)?)[ \u00a0-]?(" + _UNIT + ")")
_LINK = re.compile(r"\]\(https?://|<https?://")
_SCALES = (1, 1e3, 1e6, 1e9, 1e12, 2**10, 2**20, 2**30, 1e-2)


def _value(text):
    return float(text.replace(",", ""))


def _literals(nb):
    """All numbers in code, also those inside strings: a label in a figure is written there."""
    values = set()
    for cell in code_cells(nb):
        try:
            tree = ast.parse(re.sub(r"^[ \t]*[%!].*$", "pass", cell.source, flags=re.M))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
                values.add(float(node.value))
    return values


def _printed(nb):
    """Numbers in outputs; those between ‹ › do not count, the next run prints others."""
    text = re.sub("\u2039[^\u203a]*\u203a", " ", "\n".join(output_text(c) for c in code_cells(nb)))
    return {_value(n) for n in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e\d+)?", text) if n.strip(",")}


def _prose(nb):
    """Prose cells up to the exercises, without code, formulas and link targets."""
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        if re.search(r"^#+ Exercises?\b", cell.source, flags=re.M):
            return
        yield re.sub(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", " ", cell.source, flags=re.S)


def sentences(text):
    return re.split(r"(?<=[.!?])\s+(?=\S)|\n\s*\n|\n(?=[|*#-])", text)


def unsupported(nb):
    """(sentence, number) pairs, in the order of the page."""
    literals, printed = _literals(nb), _printed(nb)
    found = []
    for text in _prose(nb):
        for sentence in sentences(text):
            if _LINK.search(sentence):
                continue
            for match in _NUMBER.finditer(sentence):
                value = _value(match[1])
                if value in printed or any(value * scale in literals for scale in _SCALES):
                    continue
                found.append((" ".join(sentence.split()), match[0]))
    return found
