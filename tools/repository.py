"""Change the repository's address in every file that carries it.

    repository.py https://github.com/OWNER/NAME
"""
import re
import subprocess
import sys

from notebooks import ROOT, Refused, pick, write_text
from sync import main as sync, repository


def main(argv):
    new = argv[0].rstrip("/") if argv else ""
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", new):
        raise Refused(f"usage: make repository URL=https://github.com/OWNER/NAME, got {new!r}")
    old = repository()
    listed = subprocess.run(["git", "ls-files", "-z", "--", "*.md", "*.yml", "*.toml", "*.cff"],
                            cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_text(encoding="utf-8")
        if old in text:
            write_text(ROOT / name, text.replace(old, new))
            print(f"{name}: {text.count(old)}")
    sync(pick([]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as refused:
        sys.exit(f"repository: {refused}")
