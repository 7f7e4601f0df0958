"""The book's own rules about chapters, as functions that return what breaks them.

    rules.py [CHAPTER...]

Each finding is one line that names the file, the place and what to do. A rule here
has a test that breaks it on purpose.
"""
import dis
import re
import sys

import nbformat

import prose_numbers
from fingerprint import fingerprint, stored
from notebooks import (CHAPTERS, GPU_TAGS, ROOT, Refused, code_cells, is_gpu, magic_gpus,
                       output_text, pick, read, tags)
from sync import KERNELSPEC, read_text, setup_cell

TAGS = {"setup", "remove-cell", "hide-input", "solution", "raises-exception", *GPU_TAGS.values()}
KINDS = {"exact", "theorem", "experiment", "hardware", "history", "opinion"}
STATUSES = {"checked", "cited", "withdrawn"}
MUST_BE_CHECKED = {"exact", "theorem", "experiment"}
COLUMNS = 79
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}
_PLACES = re.compile(r"0x[0-9a-f]{6,}|/tmp/|/home/|/Users/|site-packages|ipykernel_\d")
_CLAIM_CALL = re.compile(r"\bclaim\(\s*[\"']([^\"']+)[\"']")
_CHECK_CALL = re.compile(r"\bcheck\(\s*[\"']([^\"']+)[\"']\s*,\s*(\w+)")
_HTML = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]*)\b")
_ALLOWED_HTML = {"details", "summary", "br", "sub", "sup"}


class Chapter:
    """A chapter's text and notebook, read once for all rules."""

    def __init__(self, name, folder=CHAPTERS):
        self.name = name
        self.text = read_text(folder / f"{name}.md")
        self.nb = read(folder / f"{name}.ipynb")

    def at(self, number, message):
        return f"chapters/{self.name}.md, code cell {number}: {message}"

    def here(self, message):
        return f"chapters/{self.name}.md: {message}"

    def code(self):
        return list(enumerate(code_cells(self.nb)))

    def markdown(self):
        return "\n\n".join(c.source for c in self.nb.cells if c.cell_type == "markdown")


def _shape(nb):
    return [(c.cell_type, c.source.strip(), {k: v for k, v in c.metadata.items() if k != "lines_to_next_cell"})
            for c in nb.cells]


def pairing(chapter):
    """Text and notebook hold the same cells, and the notebook names no private kernel."""
    if _shape(chapter.text) != _shape(chapter.nb):
        yield chapter.here("text and notebook differ: run `make sync`")
    if dict(chapter.nb.metadata.get("kernelspec", {})) != KERNELSPEC:
        yield chapter.here("the notebook's kernel must be python3: run `make sync`")
    if re.search(r"\d", chapter.name):
        yield chapter.here("chapter files carry no numbers: order lives in _toc.yml")
    try:
        nbformat.validate(chapter.nb)
    except nbformat.ValidationError as error:
        yield chapter.here(f"not a valid notebook: {error.message}")


def set_up(chapter):
    """The first code cell is the set-up cell, as `make sync` writes it."""
    first = code_cells(chapter.nb)[0]
    if not {"setup", "remove-cell"} <= tags(first) or first.source != setup_cell():
        yield chapter.at(0, "must be the set-up cell, tagged [setup, remove-cell]: run `make sync`")


def executed(chapter):
    """Every CPU cell has run, of this very code, and no output shows an error."""
    for number, cell in chapter.code():
        if cell.execution_count is None and not is_gpu(cell):
            yield chapter.at(number, f"never executed: run `make execute CHAPTER={chapter.name}`")
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in tags(cell):
                yield chapter.at(number, f"stored output is an error ({output.ename})")
            if output.get("name") == "stderr":
                yield chapter.at(number, "writes to stderr: silence the warning or print the text")
    if stored(chapter.nb, "cpu") != fingerprint(chapter.nb, "cpu"):
        yield chapter.here(f"its code changed since its outputs were stored: run `make execute CHAPTER={chapter.name}`")


def gpu_cells(chapter):
    """The magic and the tag of a GPU cell say the same, and no later cell needs its names."""
    only_on_gpu = set()
    for number, cell in chapter.code():
        wanted = magic_gpus(cell)
        have = {n for n, tag in GPU_TAGS.items() if tag in tags(cell)}
        expected = {n for n in GPU_TAGS if n <= wanted}
        if have != expected:
            want = [GPU_TAGS[n] for n in sorted(expected)]
            yield chapter.at(number, f"%%needs_gpu and tags differ: with this first line the tags are {want}")
        try:
            needed, assigned = _names(cell.source)
        except SyntaxError as error:
            yield chapter.at(number, f"is not Python: {error.msg}")
            continue
        if wanted:
            only_on_gpu |= assigned
            continue
        if missing := needed & only_on_gpu:
            yield chapter.at(number, f"needs {sorted(missing)} of a GPU cell, which does not run on a CPU")
        only_on_gpu -= assigned


def _names(source):
    """(names a cell reads before it assigns them, names it assigns), of the notebook's globals."""
    code = compile(re.sub(r"^[ \t]*[%!].*$", "pass", source, flags=re.M), "cell", "exec")
    needed, assigned = set(), set()
    for step in dis.get_instructions(code):
        if step.opname == "STORE_NAME":
            assigned.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in assigned:
            needed.add(step.argval)
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_consts")]
    while inner:  # functions and classes: what they read may be assigned later in the cell
        function = inner.pop()
        inner += [constant for constant in function.co_consts if hasattr(constant, "co_consts")]
        needed |= {step.argval for step in dis.get_instructions(function)
                   if step.opname == "LOAD_GLOBAL"} - assigned
    return needed, assigned


def outputs(chapter):
    """Outputs hold no path or address, and every measured marker is closed on its line."""
    for number, cell in chapter.code():
        text = output_text(cell)
        if place := _PLACES.search(text):
            yield chapter.at(number, f"its output shows {place[0]!r}, which differs between machines")
        for line in text.splitlines():
            if re.search("[\u2039\u203a]", re.sub("\u2039[^\u2039\u203a]*\u203a", "", line)):
                yield chapter.at(number, f"unbalanced \u2039 \u203a in its output: {line.strip()!r}")


def cells(chapter):
    """Known tags, lines that fit a phone, and alt text for every picture."""
    for number, cell in chapter.code():
        if unknown := tags(cell) - TAGS:
            yield chapter.at(number, f"unknown tags {sorted(unknown)}; known: {sorted(TAGS)}")
        if long := [line for line in cell.source.splitlines() if len(line) > COLUMNS]:
            if "setup" not in tags(cell):
                yield chapter.at(number, f"a line longer than {COLUMNS} characters: {long[0][:40]!r}...")
        pictures = sum(k.startswith("image/") for o in cell.outputs for k in o.get("data", {}))
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if pictures and len(alt) < 20:
            yield chapter.at(number, "its picture has no alt text (mystnb: {image: {alt: ...}} in the cell's header)")


def markdown(chapter):
    """Markdown that reads the same on the page, in Colab, JupyterLab and on GitHub."""
    text = chapter.markdown()
    bare = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    if re.search(r"^(`{3,}|:{3,})\{", text, flags=re.M):
        yield chapter.here("a MyST directive: Colab and GitHub would show its source")
    if role := re.search(r"\{[a-z][a-z:_-]*\}`", text):
        yield chapter.here(f"a MyST role {role[0]!r}: Colab and GitHub would show its source")
    if extra := {t.lower() for t in _HTML.findall(re.sub(r"\$[^$]*\$|<https?://[^>]*>", "", bare))} - _ALLOWED_HTML:
        yield chapter.here(f"HTML elements {sorted(extra)}; allowed are {sorted(_ALLOWED_HTML)}")
    titles = re.findall(r"^# .*", bare, flags=re.M)
    if len(titles) != 1 or not chapter.nb.cells[0].source.startswith("# "):
        yield chapter.here(f"needs exactly one title, in its first cell; has {len(titles)}")


def exercises(chapter):
    """At least four, each with a starter that says so and a folded solution that passes."""
    calls = {}
    for number, cell in chapter.code():
        for exercise, _ in _CHECK_CALL.findall(cell.source):
            calls.setdefault(exercise, []).append((number, cell))
    if len(calls) < 4:
        yield chapter.here(f"has {len(calls)} exercises; at least 4")
    for exercise, found in calls.items():
        starters = [c for _, c in found if "solution" not in tags(c)]
        solutions = [(n, c) for n, c in found if "solution" in tags(c)]
        if len(starters) != 1 or len(solutions) != 1:
            yield chapter.here(f"{exercise} needs one starter and one solution cell that call check()")
            continue
        if f"{exercise}: not attempted" not in output_text(starters[0]):
            yield chapter.here(f"{exercise}: its starter must print 'not attempted'")
        number, solution = solutions[0]
        if f"{exercise}: right" not in output_text(solution):
            yield chapter.at(number, f"the solution of {exercise} does not print 'right'")
        if "hide-input" not in tags(solution) or any(solution.metadata.get(k) != v for k, v in FOLDED.items()):
            yield chapter.at(number, f"a solution is folded: tags [solution, hide-input], {FOLDED}")


def claim_calls(chapter, claims):
    """Each claim a cell makes exists, is marked checked, and was seen to hold there."""
    for number, cell in chapter.code():
        text = output_text(cell)
        for id in _CLAIM_CALL.findall(cell.source):
            row = claims.get(id)
            if row is None:
                yield chapter.at(number, f"claims {id}, which is not in claims.csv")
            elif row.status != "checked" or row.chapter != chapter.name:
                yield chapter.at(number, f"claims {id}, which claims.csv calls {row.status} in {row.chapter}")
            elif cell.execution_count is not None and f"\u2713 {id} " not in text:
                yield chapter.at(number, f"claims {id}, but its stored output has no ✓ {id}")


def claim_rows(chapters, claims):
    """claims.csv itself: known kinds, one line each, and every checked row checked somewhere."""
    made = {id for chapter in chapters for _, cell in chapter.code() for id in _CLAIM_CALL.findall(cell.source)}
    names = {chapter.name for chapter in chapters}
    for id, row in claims.items():
        where = f"companion/claims.csv, {id}"
        if not re.fullmatch(r"C\d{3,}", id):
            yield f"{where}: ids are C and digits"
        if row.kind not in KINDS or row.status not in STATUSES:
            yield f"{where}: kind {row.kind!r}, status {row.status!r}"
        if row.kind in MUST_BE_CHECKED and row.status == "cited":
            yield f"{where}: a claim of kind {row.kind} is checked, not cited"
        if row.status == "checked" and (not row.band or row.chapter not in names or id not in made):
            yield f"{where}: marked checked, so it needs a band and a cell of its chapter that calls claim({id!r}, ...)"
        if row.status == "cited" and not row.source.startswith("https://"):
            yield f"{where}: cited, so it needs a link as its source"
        if row.status == "withdrawn" and not row.band:
            yield f"{where}: withdrawn, so its band must say why"
        if not row.statement or any("\n" in value for value in vars(row).values()):
            yield f"{where}: an empty statement, or a line break"


def sanitizer(text):
    """Every rule of the sanitizer file is one that nbval sees."""
    from nbval.plugin import get_sanitize_patterns
    if not text.isascii():
        yield "tools/nbval_sanitize.cfg: must be ASCII, it is read in the locale's encoding"
    wanted, seen = len(re.findall(r"^\s*regex", text, flags=re.M)), len(get_sanitize_patterns(text))
    if wanted != seen or not seen:
        yield (f"tools/nbval_sanitize.cfg: {wanted} rules written, {seen} understood; "
               "each needs adjacent lines 'regex: ' and 'replace: ' from the first column, with the space")


def prose(chapter):
    """Every number with a unit in prose is printed, a literal, an exercise's, or sourced."""
    for sentence, number in prose_numbers.unsupported(chapter.nb):
        yield chapter.here(f"{number!r} in prose is printed by no cell, is no literal and has no source: {sentence!r}")


CHAPTER_RULES = (pairing, set_up, executed, gpu_cells, outputs, cells, markdown, exercises, prose)


def findings(names):
    """All findings over chapters ``names``, claims.csv and the sanitizer file."""
    sys.path.insert(0, str(ROOT))
    from companion.report import claims
    chapters = [Chapter(name) for name in names]
    for chapter in chapters:
        for rule in CHAPTER_RULES:
            yield from rule(chapter)
        yield from claim_calls(chapter, claims())
    yield from sanitizer((ROOT / "tools/nbval_sanitize.cfg").read_text(encoding="utf-8"))
    if set(names) == set(pick([])):
        yield from claim_rows(chapters, claims())


def main(argv):
    found = list(findings(pick(argv)))
    print("\n".join(found) or "all rules hold")
    sys.exit(bool(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"rules: {refused}")
