"""The text that the small decoder learns, frozen in the package.

The reST sources of the documentation of Python 3.11.2 (PSF licence; see THIRD_PARTY.md), as
``tools/freeze_text.py`` packed them: a twentieth of the files is held out whole.
"""
import functools
import hashlib
import lzma
from importlib import resources

_SHA256 = {
    "train": "712131e01953afe473fdd6c47150217bc29abb25a697563a5ffe304154a50ab0",
    "heldout": "f39af3c679c23e68ff9cae0dfacb08ebe85a5a60398fd382d4bbeb6564101efe",
}


@functools.cache
def text(part):
    """The bytes of ``"train"`` (10.6 MB) or ``"heldout"`` (0.46 MB).

    Raises ValueError for another name, and where the file is not the one that was frozen.
    """
    if part not in _SHA256:
        raise ValueError(f"corpus: no part {part!r}; there are {', '.join(_SHA256)}")
    name = f"python-docs-{part}.txt.xz"
    content = lzma.decompress(resources.files("companion").joinpath("data", name).read_bytes())
    if hashlib.sha256(content).hexdigest() != _SHA256[part]:
        raise ValueError(f"corpus: {name} is damaged; install the package again")
    return content


@functools.cache
def tokens(part):
    """``text(part)`` as a uint8 tensor on the CPU: one token a byte."""
    import torch
    return torch.frombuffer(bytearray(text(part)), dtype=torch.uint8)


def batch(data, batch_size, length, generator):
    """Random windows of ``data`` [N] and the bytes that follow: two [B, T] int64 tensors.

    They lie where ``data`` lies. generator: a CPU ``torch.Generator``, so that every
    device sees the same windows.
    """
    import torch
    if not 0 < length < len(data):
        raise ValueError(f"corpus: windows of {length} from {len(data)} bytes")
    starts = torch.randint(len(data) - length, (batch_size, 1), generator=generator)
    window = data[starts.to(data.device) + torch.arange(length + 1, device=data.device)].long()
    return window[:, :-1], window[:, 1:]


def windows(data, length):
    """``data`` [N] cut into consecutive windows: inputs and targets [N // length, T]; the rest is left."""
    count = (len(data) - 1) // length
    inputs = data[: count * length].view(count, length).long()
    return inputs, data[1: count * length + 1].view(count, length).long()
