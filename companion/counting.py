"""Counting the bytes that live tensors hold, by their storages.

    from companion.counting import Film, saved_tensors, storage_bytes
    storage_bytes(model.parameters())                       # views, ties: once
    storage_bytes(saved_tensors(lambda: model(x), but=model.parameters()))

A storage is one allocation; many tensors may look at it. Blind to what a kernel
allocates and frees within one op, and to storages resized after they were seen.

Taught in: chapters/memory.
"""
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def storages(tensors):
    """The distinct storages behind ``tensors`` (None is skipped), by identity.

    Taught in: chapters/memory.
    """
    found = {}
    for t in tensors:
        if t is not None:
            storage = t.untyped_storage()
            found[storage._cdata] = storage
    return found


def storage_bytes(tensors):
    """Bytes allocated behind ``tensors``, each storage once.

    Taught in: chapters/memory.
    """
    return sum(s.nbytes() for s in storages(tensors).values())


def saved_tensors(function, but=()):
    """What autograd saves while ``function()`` runs: one tensor per storage.

    but: tensors whose storages are left out, such as the parameters.
    Taught in: chapters/memory.
    """
    skip, found = storages(but), {}

    def pack(t):
        key = t.untyped_storage()._cdata
        if key not in skip:
            found.setdefault(key, t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return list(found.values())


class Film(TorchDispatchMode):
    """Live bytes after each operation that runs under it, by category.

        film = Film(parameters=model.parameters(), inputs=[x])
        with film, film.saving():
            loss = model(x).sum()
        film.frames()["activations"]     # a number of bytes per operation

    Storages that live already are named when it is made; the others begin as
    ``temporaries`` and can be named at any time: a name holds for a storage's
    whole life.  Taught in: chapters/memory.
    """

    def __init__(self, **residents):
        super().__init__()
        self.ops, self.lives, self.open = [], [], {}
        for label, tensors in residents.items():
            self.label(label, tensors)

    def label(self, label, tensors):
        for t in tensors:
            self._see(t)["label"] = label

    def saving(self):
        """Hooks that name what autograd saves ``activations``."""
        def pack(t):
            life = self._see(t)
            if life["label"] == "temporaries":
                life["label"] = "activations"
            return t
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)

    def _see(self, t):
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.open:
            self.open[key] = {"bytes": storage.nbytes(), "born": len(self.ops),
                              "died": None, "label": "temporaries"}
            self.lives.append(self.open[key])
            weakref.finalize(storage, self._died, key).atexit = False
        return self.open[key]

    def _died(self, key):
        self.open.pop(key)["died"] = len(self.ops)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor):
                self._see(t)
        self.ops.append(func.overloadpacket.__name__)
        return out

    def frames(self):
        """{category: live bytes after each operation}."""
        n, rows = len(self.ops), {}
        for life in self.lives:
            row = rows.setdefault(life["label"], [0] * n)
            died = n if life["died"] is None else life["died"]
            for i in range(life["born"], died):
                row[i] += life["bytes"]
        return rows

    def peak(self):
        """(bytes, index of the operation) of the fullest frame."""
        totals = [sum(column) for column in zip(*self.frames().values())]
        return max(totals), totals.index(max(totals))
