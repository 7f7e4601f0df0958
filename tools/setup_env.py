"""Make .venv/book or .venv/test: shows its steps, and goes on where it was stopped.

    setup_env.py book|test [--newest]

Standard library only, and parsed by old Pythons too, to tell them what is missing.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MINIMUM = (3, 11)
# name -> (what it needs, versions of what that brings, what to install first because it is
# large, gigabytes needed)
ENVIRONMENTS = {
    "book": ("requirements-book.txt", "constraints-book.txt", (), 0.6),
    "test": ("requirements.txt", "constraints.txt", ("torch", "torchvision"), 8.0),
    "oldest": ("requirements-oldest.txt", "requirements-oldest.txt", ("torch", "torchvision"), 8.0),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Stop(Exception):
    """One line for the person who ran make."""


def main(argv):
    if sys.version_info < MINIMUM:
        raise Stop("this book needs Python %d.%d or newer, and %s is %s. Name another one: make PYTHON=python3.12 ..."
                   % (MINIMUM + (sys.executable, sys.version.split()[0])))
    name, newest = argv[0], "--newest" in argv
    requirements, constraints, first, gigabytes = ENVIRONMENTS[name]
    folder = os.path.join(ROOT, ".venv", name)
    wanted = digest((requirements, constraints), newest)
    if ready(folder) == wanted:
        return
    say(name, "setting up %s (once; %.1f GB)" % (os.path.relpath(folder, ROOT), gigabytes))
    if not ready(folder):
        need_space(gigabytes)
    make_venv(folder, name)
    lines = requirement_lines(requirements, newest)
    large = [line for line in lines if line.split("==")[0] in first]
    if large:
        say(name, "installing %s: the large part" % " ".join(large))
        pip(folder, large, None if newest else constraints)
    say(name, "installing %d packages of %s" % (len(lines), requirements))
    pip(folder, lines, None if newest else constraints)
    if name == "test":
        say(name, "preparing fonts and a browser")
        run([python(folder), "-c", "import matplotlib.pyplot"], "matplotlib does not import")
        install_browser()
    with open(os.path.join(folder, ".ready"), "w") as file:
        file.write(wanted)
    say(name, "ready")


def say(name, text):
    print("[set-up: %s] %s" % (name, text), flush=True)


def python(folder):
    return os.path.join(folder, "bin", "python")


def ready(folder):
    try:
        with open(os.path.join(folder, ".ready")) as file:
            return file.read()
    except OSError:
        return ""


def digest(files, newest):
    """Changes when the requirements do, so that the environment is brought up to them."""
    content = hashlib.sha256(repr((newest, sys.version_info[:2])).encode())
    for name in files:
        with open(os.path.join(ROOT, name), "rb") as file:
            content.update(file.read())
    return content.hexdigest()


def requirement_lines(requirements, newest):
    with open(os.path.join(ROOT, requirements)) as file:
        lines = [line.split("#")[0].strip() for line in file]
    return [re.sub("==[^; ]+", "", line) if newest else line for line in lines if line]


def need_space(gigabytes):
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < gigabytes:
        raise Stop("this needs %.1f GB of disk and %s has %.1f GB free: make room, then run it again"
                   % (gigabytes, ROOT, free))


def make_venv(folder, name):
    """A new environment, unless there is one whose pip works (an earlier try's)."""
    works = os.path.exists(python(folder)) and not subprocess.call(
        [python(folder), "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if works:
        return
    try:
        import ensurepip  # noqa: F401  Debian and Ubuntu ship it apart
    except ImportError:
        raise Stop("python3 has no venv here. On Debian or Ubuntu: apt-get install python3-venv")
    say(name, "making the environment")
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", folder], "the environment could not be made")


def pip(folder, lines, constraints):
    command = [python(folder), "-m", "pip", "install", "--disable-pip-version-check"] + lines
    command += ["-c", os.path.join(ROOT, constraints)] if constraints else ["--upgrade"]
    run(command, "installing stopped (no network? a full disk? pip's own lines are above). "
                 "What is installed stays: the same make command goes on from here")


def run(command, otherwise):
    if subprocess.call(command):
        raise Stop(otherwise)


def find_browser():
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def install_browser():
    """Chromium from the system's packages where we may; else say what to do."""
    if find_browser():
        return
    if shutil.which("apt-get") and os.geteuid() == 0:
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "chromium"]):
            subprocess.call(command, env=environment, stdout=subprocess.DEVNULL)
        if find_browser():
            return
    say("test", "no browser: the tests of the site in a browser will be skipped. "
                "To run them, install chromium (Debian: apt-get install chromium)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Stop as stop:
        sys.exit("set-up: %s" % stop)
    except KeyboardInterrupt:
        sys.exit("set-up: interrupted; the same make command goes on from here")
