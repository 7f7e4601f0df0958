"""Freeze the text that the small decoder learns: Python 3.11's documentation sources.

    freeze_text.py FOLDER

FOLDER is the `_sources` folder of Debian's package python3.11-doc (3.11.2). Files are taken
in the order of their paths; every twentieth, by a hash of its path, is held out whole, so
that no held-out line stands beside one that was trained on. Prints the checksums that
companion/corpus.py verifies.
"""
import hashlib
import lzma
import sys
from pathlib import Path

from notebooks import ROOT

SEPARATOR = b"\n\f\n"


def held_out(name):
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def main(argv):
    folder = Path(argv[0])
    files = sorted(folder.rglob("*.rst.txt"), key=lambda p: p.relative_to(folder).as_posix())
    if not files:
        sys.exit(f"freeze_text: no *.rst.txt under {folder}")
    parts = {"train": [], "heldout": []}
    for file in files:
        kind = "heldout" if held_out(file.relative_to(folder).as_posix()) else "train"
        parts[kind].append(file.read_bytes().replace(b"\r\n", b"\n").strip())
    for kind, texts in parts.items():
        text = SEPARATOR.join(texts)
        path = ROOT / f"companion/data/python-docs-{kind}.txt.xz"
        path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        print(f"{path.name}: {len(texts)} files, {len(text):,} bytes, {path.stat().st_size:,} packed, "
              f"sha256 {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1:])
