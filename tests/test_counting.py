"""companion.counting against hand counts; and the chapter's definitions are the package's."""
import ast
import gc

import jupytext
import pytest
import torch
from torch import nn

import companion.counting
import companion.memory
from companion.counting import Film, saved_tensors, storage_bytes, storages
from notebooks import CHAPTERS, code_cells


def test_each_storage_counts_once_and_whole():
    base = torch.zeros(10, 10)
    views = [base, base[0], base.t(), base[:, ::2], base.view(100), base[3, 3], None]
    assert storage_bytes(views) == 400
    assert storage_bytes([base[0, :1]]) == 400            # a view keeps it all alive
    assert storage_bytes([torch.zeros(1).expand(1000)]) == 4
    assert storage_bytes([torch.empty(0), torch.zeros(())]) == 4
    assert storage_bytes([base, base.clone()]) == 800
    assert storage_bytes([]) == 0


def test_meta_storages_are_told_apart():
    """Their data pointers are all 0, so a count by pointer would see one."""
    a, b = torch.empty(5, device="meta"), torch.empty(7, device="meta")
    assert a.data_ptr() == b.data_ptr() and storage_bytes([a, a[1:], b]) == 48


def test_saved_tensors_leaves_out_what_it_is_told():
    layer, x = nn.Linear(6, 3, bias=False), torch.ones(5, 6, requires_grad=True)
    assert storage_bytes(saved_tensors(lambda: layer(x))) == 4 * (30 + 18)
    assert storage_bytes(saved_tensors(lambda: layer(x), but=layer.parameters())) == 4 * 30
    assert saved_tensors(lambda: layer(x.detach()), but=[x, *layer.parameters()]) == []
    with torch.no_grad():
        assert saved_tensors(lambda: layer(x)) == []
    layer.weight.requires_grad_(False)                    # frozen: the input need not be kept
    assert storage_bytes(saved_tensors(lambda: layer(x))) == 4 * 18


def test_saved_tensors_leave_gradients_alone():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    layer(x).sum().backward()
    want = layer[0].weight.grad.clone()
    layer.zero_grad()
    out = []
    saved_tensors(lambda: out.append(layer(x).sum()))
    out[0].backward()
    assert torch.equal(layer[0].weight.grad, want)


def film_of(function, **residents):
    film = Film(**residents)
    with film:
        function()
    return film


def test_film_by_hand():
    x = torch.ones(100)                                   # 400 bytes

    def work():
        a = x * 2                                         # + 400
        b = a + 1                                         # + 400
        del a                                             # - 400, seen by the next operation
        b.mul_(3)                                         # in place
        b.view(10, 10).t()                                # views
        torch._foreach_sqrt([b, b])                       # + 800, then gone
        b.sum()                                           # + 4

    film = film_of(work, held=[x])
    assert film.ops == ["mul", "add", "mul_", "view", "t", "_foreach_sqrt", "sum"]
    assert film.frames() == {"held": [400] * 7, "temporaries": [400, 800, 400, 400, 400, 1200, 404]}
    assert film.peak() == (1600, 5)


def test_film_sees_the_end_of_what_was_there_before():
    box = [torch.ones(100)]
    film = Film(held=box)
    with film:
        y = torch.ones(1)
        box.clear()
        y = y + 1
    assert film.frames()["held"] == [400, 0]


def test_a_name_holds_for_the_whole_life():
    w, film = nn.Parameter(torch.ones(50)), None
    film = Film(parameters=[w])
    with film:
        with film.saving():
            loss = (w.exp() * 2).sum()                    # exp saves its output
        loss.backward()
        film.label("gradients", [w.grad])
    frames = film.frames()
    assert frames["parameters"] == [200] * len(film.ops)
    first = film.ops.index("exp")
    assert frames["activations"][first] == 200 and frames["activations"][-1] == 0
    assert frames["gradients"][-1] == 200 and frames["gradients"][first] == 0


def test_film_keeps_nothing_alive():
    film = Film()
    with film:
        x = torch.ones(1000)
        y = x * 2
    assert len(film.open) == 2
    del x, y
    gc.collect()
    assert not film.open


@pytest.mark.parametrize("module", [companion.counting, companion.memory],
                         ids=["counting", "memory"])
def test_the_chapters_definitions_are_the_packages(module):
    """One definition each: the same syntax tree, docstrings apart."""
    cells = code_cells(jupytext.read(CHAPTERS / "memory.md"))
    taught = definitions("\n".join(c.source for c in cells if not c.source.startswith("%%")))
    with open(module.__file__, encoding="utf-8") as file:
        packaged = definitions(file.read())
    shared = set(packaged) & set(taught)
    assert shared >= {name for name in packaged if not name.isupper()}
    for name in shared:
        assert packaged[name] == taught[name], f"{name} differs between chapter and package"


def definitions(source):
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(without_docstrings(node))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper():
            found[node.targets[0].id] = ast.dump(node.value)
    return found


def without_docstrings(node):
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
            inner.body = inner.body[1:]
    return node


def test_a_changed_definition_is_noticed():
    plain = definitions("def f(x):\n return x")
    assert plain == definitions("def f(x):\n 'doc'\n return x")
    assert plain != definitions("def f(x):\n return x + 1")


def test_storages_are_found_by_identity_not_value():
    assert len(storages([torch.ones(2), torch.ones(2)])) == 2
