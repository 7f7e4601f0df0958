"""Each rule of tools/rules.py is broken here on purpose, so that it is seen to fail."""
import copy

import jupytext
import nbformat
import pytest

import prose_numbers
import rules
from companion.report import Claim
from fingerprint import fingerprint
from notebooks import code_cells
from sync import KERNELSPEC, setup_cell

HEADER = """---
jupytext:
  text_representation: {extension: .md, format_name: myst, format_version: 0.13}
kernelspec: {name: python3, display_name: Python 3, language: python}
---
"""
BODY = """
# A title

Seven times six is 42 bytes. See [a source](https://example.org): 99 GB.

```{code-cell} ipython3
:tags: [setup, remove-cell]

SETUP
```

```{code-cell} ipython3
from companion import claim
claim("C001", 6 * 7 == 42)
size = 16
```

```{code-cell} ipython3
:tags: [needs-gpu]

%%needs_gpu
on_gpu = size
```

```{code-cell} ipython3
---
mystnb:
  image: {alt: a line that rises from left to right}
---
print("picture")
```
""" + "".join(f"""
## Exercise {n}

Is 5 MB enough?

```{{code-cell}} ipython3
def f{n}(x):
    ...
check("demo-{n}", f{n})
```

```{{code-cell}} ipython3
---
tags: [solution, hide-input]
jupyter: {{source_hidden: true}}
cellView: form
---
def g{n}(x):
    return x
check("demo-{n}", g{n})
```
""" for n in range(1, 5))
CLAIMS = {"C001": Claim("C001", "demo", "It is 42.", "exact", "checked", "equal; catches 41", "", "")}
PICTURE = nbformat.v4.new_output("display_data", {"image/png": "aGVsbG8="})
SETUP, CLAIMING, GPU, DRAWING, STARTER, SOLUTION = range(6)  # code cells of BODY


def printed(cell, text):
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]


@pytest.fixture
def chapter():
    made = rules.Chapter.__new__(rules.Chapter)
    made.name = "demo"
    made.text = jupytext.reads(HEADER + BODY.replace("SETUP", setup_cell()), fmt="md:myst")
    made.nb = copy.deepcopy(made.text)
    made.nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "companion": {}})
    made.nb.nbformat_minor = 5
    cells = code_cells(made.nb)
    for number, cell in enumerate(cells, 1):
        cell.execution_count, cell.id = number, f"cell-{number}"
    for number, cell in enumerate(made.nb.cells):
        cell.id = f"cell-{number}"
    printed(cells[CLAIMING], "✓ C001 It is 42.\n42 ‹ 1.0› bytes")
    cells[DRAWING].outputs = [PICTURE]
    for n in range(1, 5):
        printed(cells[2 * n + STARTER - 2], f"demo-{n}: not attempted")
        printed(cells[2 * n + SOLUTION - 2], f"demo-{n}: right")
    made.nb.metadata.companion.cpu = fingerprint(made.nb, "cpu")
    return made


def all_findings(chapter):
    found = [line for rule in rules.CHAPTER_RULES for line in rule(chapter)]
    return found + list(rules.claim_calls(chapter, CLAIMS)) + list(rules.claim_rows([chapter], CLAIMS))


def test_a_good_chapter_breaks_no_rule(chapter):
    assert all_findings(chapter) == []


def set_tags(number, *tags):
    def change(chapter):
        code_cells(chapter.nb)[number].metadata["tags"] = list(tags)
    return change


def set_source(number, source):
    def change(chapter):
        code_cells(chapter.nb)[number].source = source
    return change


def set_output(number, text):
    def change(chapter):
        printed(code_cells(chapter.nb)[number], text)
    return change


def set_prose(text):
    def change(chapter):
        chapter.nb.cells[0].source += f"\n\n{text}"
    return change


def drop_metadata(number, key):
    def change(chapter):
        del code_cells(chapter.nb)[number].metadata[key]
    return change


def add_output(number, output):
    def change(chapter):
        code_cells(chapter.nb)[number].outputs.append(output)
    return change


def forget_execution(chapter):
    code_cells(chapter.nb)[CLAIMING].execution_count = None


def private_kernel(chapter):
    chapter.nb.metadata.kernelspec = {"name": "conda-env-py37-py", "display_name": "x", "language": "python"}


def numbered_file(chapter):
    chapter.name = "03_demo"


def second_title(chapter):
    chapter.nb.cells[0].source += "\n\n# Another title"


ERROR = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
STDERR = nbformat.v4.new_output("stream", name="stderr", text="a warning")
BREAKS = [
    (set_source(CLAIMING, "size = 17"), "text and notebook differ"),
    (set_source(CLAIMING, "size = 17"), "its code changed since its outputs were stored"),
    (private_kernel, "kernel must be python3"),
    (numbered_file, "carry no numbers"),
    (set_source(SETUP, "import companion"), "must be the set-up cell"),
    (set_tags(SETUP, "setup"), "must be the set-up cell"),
    (forget_execution, "never executed"),
    (add_output(CLAIMING, ERROR), "stored output is an error"),
    (add_output(CLAIMING, STDERR), "writes to stderr"),
    (set_tags(GPU), "%%needs_gpu and tags differ"),
    (set_tags(CLAIMING, "needs-gpu"), "%%needs_gpu and tags differ"),
    (set_tags(GPU, "needs-gpu", "needs-2-gpus"), "%%needs_gpu and tags differ"),
    (set_source(GPU, "%%needs_gpu 2\non_gpu = 1"), "%%needs_gpu and tags differ"),
    (set_source(DRAWING, "print(on_gpu)"), "needs ['on_gpu'] of a GPU cell"),
    (set_source(DRAWING, "def f():\n    return on_gpu\nf()"), "needs ['on_gpu'] of a GPU cell"),
    (set_source(DRAWING, "print("), "is not Python"),
    (set_output(CLAIMING, "✓ C001 It is 42.\n‹ 1.0"), "unbalanced"),
    (set_output(CLAIMING, "✓ C001 It is 42.\n1.0›"), "unbalanced"),
    (set_output(CLAIMING, "✓ C001 It is 42.\n‹ 1.0\n2.0›"), "unbalanced"),
    (set_output(CLAIMING, "✓ C001 It is 42.\n<object at 0x7f01020304>"), "differs between machines"),
    (set_output(CLAIMING, "✓ C001 It is 42.\n/tmp/x"), "differs between machines"),
    (set_tags(DRAWING, "hide-imput"), "unknown tags"),
    (set_source(DRAWING, "x = " + "1 + " * 30 + "1"), "longer than 79"),
    (drop_metadata(DRAWING, "mystnb"), "no alt text"),
    (set_prose("```{note}\nhello\n```"), "MyST directive"),
    (set_prose(":::{note}\nhello\n:::"), "MyST directive"),
    (set_prose("see {ref}`x`"), "MyST role"),
    (set_prose("<iframe src='x'></iframe>"), "HTML elements"),
    (second_title, "exactly one title"),
    (set_output(STARTER, "demo-1: right"), "starter must print"),
    (set_output(SOLUTION, "demo-1: not yet"), "does not print 'right'"),
    (drop_metadata(SOLUTION, "cellView"), "a solution is folded"),
    (set_source(SOLUTION, "pass"), "one starter and one solution"),
    (set_prose("It took 17 GB of memory."), "'17 GB' in prose"),
    (set_prose("It is 13 % faster."), "'13 %' in prose"),
    (set_source(CLAIMING, 'claim("C999", True)'), "C999, which is not in claims.csv"),
    (set_output(CLAIMING, "✗ C001 did not hold"), "no ✓ C001"),
    (set_source(CLAIMING, "size = 16"), "marked checked"),
]


@pytest.mark.parametrize("broken, message", BREAKS, ids=[message for _, message in BREAKS])
def test_each_rule_fails_when_broken(chapter, broken, message):
    broken(chapter)
    assert any(message in line and "demo" in line or message in line and "C001" in line
               for line in all_findings(chapter)), all_findings(chapter)


@pytest.mark.parametrize("change, message", [
    ({"kind": "guess"}, "kind 'guess'"),
    ({"status": "cited"}, "is checked, not cited"),
    ({"band": ""}, "needs a band"),
    ({"kind": "history", "status": "cited", "source": "a book"}, "needs a link"),
    ({"kind": "opinion", "status": "withdrawn", "band": ""}, "must say why"),
    ({"statement": "two\nlines"}, "line break"),
    ({"id": "X1"}, "ids are C and digits"),
])
def test_a_bad_row_of_claims_is_named(chapter, change, message):
    row = Claim(**{**vars(CLAIMS["C001"]), **change})
    assert any(message in line for line in rules.claim_rows([chapter], {row.id: row}))


# Without the space after "replace:" nbval drops a rule in silence, and hides nothing any more.
@pytest.mark.parametrize("text", [
    "regex: a\nreplace:\n", " regex: a\nreplace: b\n", "regex: a\n\nreplace: b\n", "regex: ‹\nreplace: b\n", ""])
def test_a_sanitizer_rule_that_does_nothing_is_found(text):
    assert list(rules.sanitizer(text))


def test_a_good_sanitizer_rule_is_not():
    assert not list(rules.sanitizer("regex: a\nreplace: b\n"))


@pytest.mark.parametrize("sentence, found", [
    ("It is 7 GB.", []),                      # 7e9 stands in a code cell
    ("It is 42 bytes.", []),                  # printed
    ("It is 1.5 s.", ["1.5 s"]),              # printed between markers only: another run prints another
    ("It is `99 GB` in code.", []),
    ("It is $99$ GB in a formula.", []),
    ("It is [99 GB](https://example.org).", []),
    ("It is [99 GB](chapter.ipynb).", ["99 GB"]),
    ("At 99 GB/s and 98 %.", ["99 GB/s", "98 %"]),
    ("C017 and v2.14 have no unit.", []),
    ("## Exercises\n\nFill 99 GB.", []),
])
def test_numbers_in_prose(sentence, found):
    nb = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_code_cell("n = 7e9"), nbformat.v4.new_markdown_cell(sentence)])
    printed(nb.cells[0], "42 bytes ‹ 1.5› s")
    assert [number for _, number in prose_numbers.unsupported(nb)] == found
