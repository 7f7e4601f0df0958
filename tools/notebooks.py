"""Where chapters lie and how their cells are read: shared by all tools."""
import json
import os
import re
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ROOT / "chapters"
GPU_TAGS = {1: "needs-gpu", 2: "needs-2-gpus"}


class Refused(Exception):
    """Something a person must mend: one line that names the file and what to do."""


def chapter_names():
    """Names of all chapters that have a text, sorted."""
    return sorted(p.stem for p in CHAPTERS.glob("*.md"))


def pick(names):
    """The chapters asked for, or all of them; Refused for one that does not exist."""
    known = chapter_names()
    for name in names:
        if name not in known:
            raise Refused(f"no chapter {name!r}: chapters/{name}.md does not exist. "
                          f"There are: {', '.join(known) or 'none'}")
    return list(names) or known


def read(path):
    """The notebook at ``path``; Refused if it is missing or not a notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise Refused(f"{_short(path)} is missing: run `make sync`, then `make execute`") from None
    except Exception as error:
        raise Refused(f"{_short(path)} is not a readable notebook ({type(error).__name__}): "
                      "restore it from git, or delete it and run `make sync`") from None


def write(nb, path):
    """Write whole or not at all: a full disk or Ctrl-C leaves the stored file as it was."""
    text = nbformat.writes(nb).rstrip("\n") + "\n"
    write_text(path, text)


def write_text(path, text):
    """Replace ``path`` by ``text`` in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise Refused(f"{_short(path)} could not be written ({error.strerror}); "
                      "the stored file is unchanged") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_json(path, data):
    write_text(path, json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def tags(cell):
    return set(cell.metadata.get("tags", []))


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def is_gpu(cell):
    return bool(tags(cell) & set(GPU_TAGS.values()))


def magic_gpus(cell):
    """How many GPUs the cell's ``%%needs_gpu`` magic asks for; 0 without the magic."""
    match = re.match(r"%%needs_gpu[ \t]*(\d*)[ \t]*$", cell.source.split("\n", 1)[0])
    return int(match[1] or 1) if match else 0


def output_text(cell):
    """All text that the cell's stored outputs show."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append(f"{output.ename}: {output.evalue}\n" + "\n".join(output.traceback))
        else:
            parts += [str(v) for k, v in output.data.items() if not k.startswith("image/")]
    return "\n".join(parts)


def _short(path):
    path = Path(path).resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
