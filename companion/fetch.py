"""Data that the book does not ship: where it is looked for, and how the cache stays whole.

A file of a data set lies below a data folder, as ``<data set>/<file>``. It is looked for in
``$COMPANION_DATA``, in the cache, and where a package may have installed it; else the whole
data set is fetched into the cache. The cache is ``$COMPANION_CACHE``, by default
``~/.cache/scaling-and-efficiency``; nothing is written elsewhere.

What is fetched is written under a temporary name, verified and then renamed, so that an
interrupted download leaves no half file behind. A file that is there but holds something else
than expected is refused by name, and never replaced in silence.
"""
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .report import strict

SECONDS = 20        # a server that is silent for so long is given up
MINUTES = 10        # and so is a program that fetches for so long
STALE = 24 * 3600   # seconds after which a temporary folder belongs to no running process


class Unavailable(RuntimeError):
    """Data cannot be had here and now; the message says what was tried, and why it failed."""


@dataclass(frozen=True)
class Dataset:
    """A named set of files, each with the SHA-256 of what ``unpack`` makes of it.

    installed: other data folders that may hold it, by what put them there.
    sources: functions that fetch it, by name. Each takes an empty folder to work in and
    returns the data folder it made there, or raises Unavailable or OSError.
    """
    name: str
    sha256: dict[str, str]
    unpack: Callable[[bytes], bytes]
    installed: dict[str, str]
    sources: dict[str, Callable[[Path], Path]]

    def read(self, file):
        """Path and verified content of ``file``.

        Raises ValueError where it is there but damaged, and Unavailable where it is nowhere.
        """
        missing = {}
        for place, folder in self._folders():
            path = Path(folder).expanduser() / self.name / file if folder else None
            if path and path.is_file():
                return path, self._accepted(path)
            missing[place] = f"no {path}" if path else "not set"
        self._fetch(missing)
        path = cache_folder() / self.name / file
        return path, self._accepted(path)

    def _folders(self):
        yield "$COMPANION_DATA", os.environ.get("COMPANION_DATA")
        yield "the cache", cache_folder()
        yield from self.installed.items()

    def _accepted(self, path):
        content, why = self._content(path)
        if why:
            raise ValueError(f"{path} is damaged: {why}. Delete it or put the right one there, "
                             "then run this again")
        return content

    def _content(self, path):
        """The content of the file at ``path``, and what is wrong with it, if anything."""
        try:
            content = self.unpack(path.read_bytes())
        except EOFError:
            return None, "it is half-written"
        except Exception as error:  # gzip and zlib each have errors of their own
            return None, reason(error)
        right = hashlib.sha256(content).hexdigest() == self.sha256[path.name]
        return content, "" if right else "its checksum is wrong"

    def _fetch(self, missing):
        """Bring the data set into the cache from the first source that has it."""
        try:
            with temporary_folder() as work:
                for place, source in self.sources.items():
                    try:
                        folder = work / f"{len(missing)}"
                        folder.mkdir()
                        return self._keep(source(folder) / self.name)
                    except (Unavailable, OSError) as error:
                        missing[place] = reason(error)
        except OSError as error:
            missing["the cache"] = (f"cannot write to {cache_folder()} ({error.strerror}): "
                                    "set COMPANION_CACHE to a folder that you can write to")
        tried = "".join(f"\n  {place}: {why}" for place, why in missing.items())
        raise Unavailable(
            f"{self.name} is not on this machine and could not be fetched. Tried:{tried}\nIf you "
            f"have the files, put them into FOLDER/{self.name} and set COMPANION_DATA=FOLDER: "
            + ", ".join(self.sha256))

    def _keep(self, folder):
        """Move the files of ``folder`` into the cache, once all of them are verified."""
        for file in self.sha256:
            if not (folder / file).is_file():
                raise Unavailable(f"it brought no {file}")
            if why := self._content(folder / file)[1]:
                raise Unavailable(f"it brought a damaged {file}: {why}")
        target = cache_folder() / self.name
        target.mkdir(exist_ok=True)
        for file in self.sha256:
            os.replace(folder / file, target / file)


def cache_folder():
    """The one folder that this package writes to."""
    folder = os.environ.get("COMPANION_CACHE") or "~/.cache/scaling-and-efficiency"
    return Path(folder).expanduser().absolute()


@contextlib.contextmanager
def temporary_folder():
    """A folder inside the cache, so that a file moves from it in one step. Removed at the end."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob(".fetching-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as folder:
        yield Path(folder)


def reason(error):
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _shown():
    """Progress is for a person at a terminal: not for a notebook, a file or a checked run."""
    return sys.stderr.isatty() and not strict()


def _opened(url):
    try:
        return urllib.request.urlopen(url, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the server's answer, an open file
        raise


def download(url, path):
    """Write what ``url`` holds to ``path``. Raises OSError, and Unavailable if it ends early."""
    with _opened(url) as answer, open(path, "wb") as file:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while chunk := answer.read(1 << 18):
            done += file.write(chunk)
            if _shown():
                print(f"\r{path.name}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", end="",
                      file=sys.stderr, flush=True)
    if _shown():
        print(file=sys.stderr)
    if done < total:
        raise Unavailable(f"{path.name} ended after {done:,} of {total:,} bytes")


def run(command, work, what=None):
    """Run a program that fetches ``what``, in folder ``work``; Unavailable if it fails."""
    if what and _shown():
        print(f"fetching {what}", file=sys.stderr, flush=True)
    environment = {**os.environ, "TMPDIR": str(work), "LC_ALL": "C.UTF-8",
                   "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=60 * MINUTES)
    except FileNotFoundError:
        raise Unavailable(f"this machine has no {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {MINUTES} minutes") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise Unavailable(reason(said[-1]))
