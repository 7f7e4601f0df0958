"""Fetch again what is kept below _static, and see that nothing has changed.

    tools/vendor.py [NAME...]         # mathjax, pyodide

Asks npm for the release named here, checks its digest, takes the files listed in the folder's
SHA256SUMS and checks each; LICENSE stays as it is. For a newer release, change its line below,
run with --write, which writes SHA256SUMS anew, and look at the difference in git. Needs npm;
reading and building the book never does.
"""
import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

STATIC = Path(__file__).resolve().parents[1] / "_static"
# name -> release, SHA-512 of the package as npm prints it, the folder in it that is kept
PACKAGES = {
    "mathjax": ("3.2.2", "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsj"
                "KPZGJvtRZM1vO+geW0OhGw==", "package/es5/"),
    "pyodide": ("314.0.7", "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7"
                "y2q+SNvi/6V5JEsOlD2R1A==", "package/"),
}
SUMS = "SHA256SUMS"


class Refused(Exception):
    """What came is not what was asked for: one line."""


def listed(folder):
    """{file: SHA-256} of a folder's list."""
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    return {name.removeprefix("./"): digest for digest, name in map(str.split, lines)}


def package(name, release, digest, folder):
    """The path of the package's archive, fetched into ``folder``."""
    made = subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder,
                           f"{name}@{release}"], capture_output=True, text=True)
    if made.returncode:
        raise Refused(f"npm could not fetch {name} {release}: {made.stderr.strip()[-200:]}")
    path = Path(folder) / made.stdout.split()[-1]
    found = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if found != digest:
        raise Refused(f"{name} {release} has the digest {found}, not {digest}")
    return path


def unpack(archive, inside, names):
    """{name: bytes} of the files ``names`` in the archive's folder ``inside``."""
    with tarfile.open(archive) as tar:
        members = {m.name: m for m in tar.getmembers() if m.isfile()}
        missing = [n for n in names if inside + n not in members]
        if missing:
            raise Refused(f"{archive.name} lacks {', '.join(missing)}")
        return {n: tar.extractfile(members[inside + n]).read() for n in names}


def fetch(name, write=False):
    """Bring _static/``name`` to the release named above; returns how many files it wrote."""
    release, digest, inside = PACKAGES[name]
    folder = STATIC / name
    wanted = listed(folder)
    with tempfile.TemporaryDirectory() as temporary:
        archive = package(name, release, digest, temporary)
        files = unpack(archive, inside, [n for n in wanted if n != "LICENSE"])
    sums = {n: hashlib.sha256(body).hexdigest() for n, body in files.items()}
    wrong = [n for n in files if sums[n] != wanted[n]]
    if wrong and not write:
        raise Refused(f"{name}: {', '.join(wrong)} differ from {SUMS}")
    for n, body in files.items():
        (folder / n).parent.mkdir(parents=True, exist_ok=True)
        (folder / n).write_bytes(body)
    if write:
        lines = [f"{sums.get(n, old)}  ./{n}\n" for n, old in wanted.items()]
        (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return len(files)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write SHA256SUMS anew")
    options = parser.parse_args(arguments)
    try:
        for name in options.names or PACKAGES:
            if name not in PACKAGES:
                raise Refused(f"no {name!r}; there are {', '.join(PACKAGES)}")
            print(f"{name}: {fetch(name, options.write)} files")
    except Refused as refused:
        sys.exit(f"vendor: {refused}")


if __name__ == "__main__":
    main()
