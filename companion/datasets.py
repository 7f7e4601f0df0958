"""Data sets of the vision experiments. Where they come from: companion/fetch.py."""
import gzip

from .fetch import Dataset, Unavailable, download, run

_PACKAGE = "dataset-fashion-mnist"


def _from_mirrors(work):
    """Fashion-MNIST from the servers that torchvision knows."""
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError):  # RuntimeError: one that fits another torch
        raise Unavailable("torchvision, which knows them, does not import") from None
    folder, errors = work / _FASHION_MNIST.name, []
    folder.mkdir()
    for mirror in FashionMNIST.mirrors:
        try:
            for file in _FASHION_MNIST.sha256:
                download(mirror + file, folder / file)
            return work
        except (Unavailable, OSError) as error:
            errors.append(f"{mirror}: {error}")
    raise Unavailable("; ".join(errors))


def _from_debian(work):
    """Fashion-MNIST from Debian's package, unpacked here: installing it would need root."""
    quiet = ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20",
             "-o", "Acquire::https::Timeout=20", "-o", "APT::Sandbox::User=root",
             "-o", f"Dir::Cache={work}"]
    try:
        run(["apt-get", *quiet, "download", _PACKAGE], work, f"Debian's package {_PACKAGE}")
    except Unavailable:  # as in containers, whose package lists are empty: fetch lists of our own
        (work / "lists/partial").mkdir(parents=True)
        quiet += ["-o", f"Dir::State::Lists={work / 'lists'}"]
        run(["apt-get", *quiet, "update"], work, "Debian's package lists")
        run(["apt-get", *quiet, "download", _PACKAGE], work, f"Debian's package {_PACKAGE}")
    for package in work.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(work)], work)
    return work / "usr/share/datasets"


# Of the unpacked content: Debian packs the same bytes without gzip's name and time, so the
# packed files differ from those that torchvision names.
_FASHION_MNIST = Dataset(
    name="fashion-mnist",
    sha256={
        "train-images-idx3-ubyte.gz":
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz":
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz":
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz":
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    unpack=gzip.decompress,
    installed={f"Debian's package {_PACKAGE}": "/usr/share/datasets"},
    sources={"torchvision's mirrors": _from_mirrors, "Debian's package, unpacked": _from_debian},
)
_FILES = {"train": "train", "test": "t10k"}


def fashion_mnist(part):
    """Images and labels of ``"train"`` (60,000) or ``"test"`` (10,000), on the CPU.

    images: uint8 [N, 28, 28], 0 is the background    labels: int64 [N], 0 to 9

    31 MB are fetched once. Raises ValueError for another ``part`` and for a damaged file, and
    ``companion.fetch.Unavailable`` where no source has them.
    Source: Xiao, Rasul & Vollgraf 2017, arXiv:1708.07747 (MIT license).
    """
    import torch
    if part not in _FILES:
        raise ValueError(f"fashion_mnist: no part {part!r}; there are {', '.join(_FILES)}")
    images, labels = (_idx(_FASHION_MNIST.read(f"{_FILES[part]}-{kind}-ubyte.gz")[1])
                      for kind in ("images-idx3", "labels-idx1"))
    return images, labels.to(torch.int64)


def _idx(content):
    """The uint8 tensor in an IDX file: 4 bytes whose last counts the sizes, the sizes, the data."""
    import torch
    dims = content[3]
    sizes = [int.from_bytes(content[4 * i: 4 * i + 4], "big") for i in range(1, dims + 1)]
    return torch.frombuffer(bytearray(content[4 + 4 * dims:]), dtype=torch.uint8).view(sizes)
