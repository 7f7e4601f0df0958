"""A folder of wheels for a GPU runner that has torch but no network.

    gpu_bundle.py FOLDER --python 3.12       pack (needs a network)
    gpu_bundle.py FOLDER --install TARGET    install there (needs none)

Only what the tools of the tests need: torch, triton, numpy and matplotlib are the runner's own.
"""
import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ipykernel", "jupytext", "nbclient", "nbval", "pytest", "setuptools", "wheel")
RUNNERS_OWN = ("torch", "numpy", "matplotlib")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def pins():
    """The versions that requirements.txt asks of PACKAGES."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("==")[0] in PACKAGES]


def pack(folder, python):
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    return subprocess.call(
        [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:",
         "--python-version", python, "--implementation", "cp", *platforms, "-d", str(folder),
         "-c", str(ROOT / "constraints.txt"), *pins()])


def install(folder, target):
    wheels = sorted(folder.glob("*.whl"))
    stamp = target / ".installed"
    names = "\n".join(wheel.name for wheel in wheels)
    if stamp.is_file() and stamp.read_text() == names:
        return 0
    code = subprocess.call(
        [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-compile", "--upgrade", "--target", str(target), *map(str, wheels)])
    if not code:
        stamp.write_text(names)
    return code


def main(argv):
    parser = argparse.ArgumentParser(prog="gpu_bundle", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--install", type=Path)
    options = parser.parse_args(argv)
    if options.install:
        for name in RUNNERS_OWN:
            if subprocess.call([sys.executable, "-c", f"import {name}"], stderr=subprocess.DEVNULL):
                return f"gpu_bundle: this runner's {sys.executable} has no {name}: the bundle does not bring it"
        return install(options.folder, options.install) and "gpu_bundle: installing failed; pip's lines are above"
    if pack(options.folder, options.python):
        return "gpu_bundle: packing failed (no network? a wheel that does not exist?); pip's lines are above"
    size = sum(f.stat().st_size for f in options.folder.glob("*.whl"))
    print(f"{options.folder}: {len(list(options.folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB. "
          "Copy the checkout with this folder to the runner; there: make execute-gpu test-gpu")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
