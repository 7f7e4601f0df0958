"""One hash per chapter and runner: has the code changed since its outputs were stored?

It covers the code cells (the set-up cell excluded; for the CPU also the GPU cells),
every module of ``companion`` they reach through imports, as syntax trees without
docstrings and comments, and the files of companion/data that these name. So rewording
a comment makes nothing stale; changing a constant in a module does. The same on every
supported Python.
"""
import ast
import hashlib
import re

from notebooks import ROOT, code_cells, is_gpu, tags

RUNNERS = ("cpu", "gpu")


def canonical(node):
    """A syntax tree as nested tuples, without positions, docstrings and empty fields.

    Not ``ast.dump``: its text differs between Python versions, which add fields.
    """
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(value, list):
                value = _without_docstring(value)
            if isinstance(node, ast.JoinedStr):  # Python 3.12 adds an empty part after {x:{y}}
                value = [part for part in value if getattr(part, "value", None) != ""]
            if value is not None and value != []:
                fields.append((name, canonical(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(canonical(item) for item in node)
    return repr(node)


def _without_docstring(body):
    first = body[0] if body else None
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if text and isinstance(first.value.value, str) else body


def _python(source):
    """A cell's source without its magics, which Python cannot parse."""
    return re.sub(r"^[ \t]*[%!].*$", "pass", source, flags=re.M)


def _magics(source):
    return re.findall(r"^[ \t]*([%!].*)$", source, flags=re.M)


def _parse(source):
    try:
        return ast.parse(_python(source))
    except SyntaxError:
        return None


def _exports():
    """companion's lazy names: public name -> module, read without importing it."""
    tree = ast.parse((ROOT / "companion/__init__.py").read_text(encoding="utf-8"))
    return next(ast.literal_eval(node.value) for node in tree.body if _is_exports(node))


def _is_exports(node):
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_EXPORTS"


def _imports(tree, package=""):
    """Modules of companion that a syntax tree names, as 'companion.x' strings."""
    exports = _exports()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "companion")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            if base.split(".")[0] != "companion":
                continue
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"
                if base == "companion" and alias.name in exports:
                    yield f"companion.{exports[alias.name]}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" and node.args:
            exercise = getattr(node.args[0], "value", None)
            if isinstance(exercise, str):  # check() loads its checker by name
                yield f"companion.exercises.{exercise.rpartition('-')[0]}"


def _file(module):
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def modules(trees):
    """Names of all companion modules reached from ``trees``, sorted."""
    todo = {m for tree in trees if tree for m in _imports(tree)}
    found = set()
    while todo:
        module = todo.pop()
        path = _file(module)
        if module in found or path is None:
            continue
        found.add(module)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        todo |= set(_imports(ast.parse(path.read_text(encoding="utf-8")), package))
    return sorted(found)


def fingerprint(nb, runner):
    """16 hex digits over what decides the chapter's outputs on ``runner``."""
    cells = [c.source for c in code_cells(nb)
             if "setup" not in tags(c) and (runner == "gpu" or not is_gpu(c))]
    trees = [_parse(source) for source in cells]
    parts = [(_magics(source), canonical(tree) if tree else source)
             for source, tree in zip(cells, trees)]
    for module in modules(trees):
        tree = ast.parse(_file(module).read_text(encoding="utf-8"))
        if module == "companion":  # a new name in its table changes no chapter that does not use it
            tree.body = [node for node in tree.body if not _is_exports(node)]
        parts.append((module, canonical(tree)))
        trees.append(tree)
    parts += [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in _data(trees)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _data(trees):
    """The files of companion/data that a string in the code names."""
    names = {node.value for tree in trees if tree for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [file for file in sorted((ROOT / "companion/data").glob("*")) if file.name in names]


def stored(nb, runner):
    """The fingerprint of the code whose outputs the notebook holds, or None."""
    return nb.metadata.get("companion", {}).get(runner)
