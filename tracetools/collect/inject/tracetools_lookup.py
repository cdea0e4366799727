"""Run as a script by the Python of a training environment: are these hook targets there?

In: a mode ("import": import their modules; "source": only read them) as argument, a JSON list of targets on standard input.
Out: one line of JSON, the last on standard output. Standard library only; Python 3.10. Knows nothing of profiles.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

MOST = 3  # suggestions
Names = dict[str, set[str]]  # of a module: its own functions and classes, and by class its methods


def look_up(target: str, imports: bool) -> dict[str, Any]:
    module, _, path = target.partition(":")
    parts = path.split(".")
    top = module.partition(".")[0]
    if absent := _absent_package(module):
        return _answer(target, "no package", f"{absent} is not installed")
    file = _source(module)
    if imports:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if file is None:
                return _answer(target, "no module", f"there is no module {module}", _elsewhere(top, parts))
            return _in_source(target, file, f"{module} cannot be imported here: {error}")
        except (Exception, SystemExit) as error:  # noqa: BLE001  training code may raise anything when imported without its devices
            return _in_source(target, file, f"{module} cannot be imported here: {_first_line(error)}")
        return _in_module(target, found)
    if file is None:
        return _answer(target, "no module", f"there is no module {module}", _elsewhere(top, parts))
    return _in_source(target, file, f"{module} was not imported")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _answer(target: str, status: str, detail: str, instead: list[str] | None = None) -> dict[str, Any]:
    return {"target": target, "status": status, "detail": detail, "instead": instead or []}


def _in_module(target: str, module: Any) -> dict[str, Any]:
    path = target.partition(":")[2].split(".")
    owner = module
    for depth, part in enumerate(path):
        if isinstance(owner, type) and part not in vars(owner) and hasattr(owner, part):
            definer = next(c for c in owner.__mro__ if part in vars(c))
            better = f"{definer.__module__}:{definer.__qualname__}.{part}"
            return _answer(target, "inherited", f"{owner.__name__} inherits {part}", [better])
        try:
            owner = inspect.getattr_static(owner, part)
        except AttributeError:
            where = ".".join([module.__name__, *path[:depth]])
            close = _close(part, [n for n in dir(owner) if not n.startswith("__")])
            near = [f"{module.__name__}:{'.'.join([*path[:depth], n, *path[depth + 1 :]])}" for n in close]
            return _answer(target, "no attribute", f"{where} has no {part}", _moved(module.__name__, path, near))
    return _answer(target, "found", "")


def _in_source(target: str, file: str | None, why: str) -> dict[str, Any]:
    """As far as the source tells: names that are made at run time are not seen."""
    module, _, text = target.partition(":")
    path = text.split(".")
    names = _names(file) if file else None
    if names is None:
        return _answer(target, "no module", why)
    if path[0] in names[""] and (len(path) == 1 or path[1] in names.get(path[0], set())):
        return _answer(target, "found in the source", why)
    known = names[""] if path[0] not in names[""] else names.get(path[0], set())
    at = 0 if path[0] not in names[""] else 1
    near = [f"{module}:{'.'.join([*path[:at], n, *path[at + 1 :]])}" for n in _close(path[at], sorted(known))]
    return _answer(target, "no attribute", f"{module} has no {text}; {why}", _moved(module, path, near))


def _close(name: str, known: list[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=MOST, cutoff=0.7)


def _moved(module: str, path: list[str], near: list[str]) -> list[str]:
    """The same name elsewhere in the package says more than a similar one in the same module."""
    return list(dict.fromkeys([*_elsewhere(module.partition(".")[0], path), *near]))[:MOST]


# ---------------------------------------------------------------- sources


def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


def _absent_package(module: str) -> str | None:
    """The package that is not installed: the first name, or the second where the first only holds packages of several wheels."""
    top, _, rest = module.partition(".")
    spec = _spec(top)
    if spec is None:
        return None if top in sys.modules else top
    if rest and spec.origin is None and spec.submodule_search_locations is not None:
        second = f"{top}.{rest.partition('.')[0]}"
        if importlib.machinery.PathFinder.find_spec(second, list(spec.submodule_search_locations)) is None:
            return second
    return None


def _source(module: str) -> str | None:
    """The file of a module, found without running the packages above it."""
    paths: list[str] | None = None
    file = None
    for i in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: i + 1])
        spec = _spec(name) if i == 0 else importlib.machinery.PathFinder.find_spec(name, paths)
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or [])
        file = spec.origin if spec.origin and spec.origin.endswith(".py") else None
    return file


def _names(file: str) -> Names | None:
    try:
        with open(file, encoding="utf-8") as text:
            tree = ast.parse(text.read())
    except (OSError, SyntaxError, ValueError):
        return None
    names: Names = {"": set()}
    for node in _statements(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names[""].add(node.name)
        elif isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {
                n.name
                for n in _statements(node)
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            }
        elif isinstance(node, ast.Assign):
            names[""] |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names[""] |= {a.asname or a.name for a in node.names}
    return names


def _statements(node: Any) -> Iterator[Any]:
    """Of a module or class, also those under an if or a try."""
    for child in node.body:
        yield child
        if isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _statements(child)


def _elsewhere(package: str, path: list[str]) -> list[str]:
    """Modules of the package that define the same name. Modules that do not contain the word are not parsed."""
    spec = _spec(package)
    found: list[str] = []
    for root in (spec.submodule_search_locations or []) if spec else []:
        for folder, folders, files in os.walk(root):
            folders[:] = [f for f in folders if f.isidentifier() and f not in ("tests", "test")]
            for name in sorted(files):
                file = os.path.join(folder, name)
                if name.endswith(".py") and _defines(file, path):
                    parts = os.path.relpath(file, os.path.dirname(root))[: -len(".py")].split(os.sep)
                    found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts) + ":" + ".".join(path))
                    if len(found) >= MOST:
                        return found
    return found


def _defines(file: str, path: list[str]) -> bool:
    try:
        with open(file, encoding="utf-8") as text:
            if f" {path[-1]}(" not in text.read():
                return False
    except (OSError, ValueError):
        return False
    names = _names(file)
    if names is None:
        return False
    own = names.get(path[0], set()) if len(path) > 1 else None
    return path[0] in names if own is not None and path[-1] in own else own is None and _is_defined(file, path[0])


def _is_defined(file: str, name: str) -> bool:
    with open(file, encoding="utf-8") as text:
        tree = ast.parse(text.read())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(n, kinds) and n.name == name for n in _statements(tree))


def _versions(targets: list[str]) -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for top in {t.partition(":")[0].partition(".")[0] for t in targets}:
        for name in importlib.metadata.packages_distributions().get(top, [top]):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def main() -> None:
    targets = json.load(sys.stdin)
    imports = sys.argv[1] == "import"
    # this script's folder must not lend its modules to the training code, nor the folder of whoever calls
    sys.path[0] = ""
    answers = [look_up(t, imports) for t in targets]
    print(flush=True)  # whatever the training code has printed without a newline
    print(json.dumps({"targets": answers, "versions": _versions(targets)}), flush=True)
    os._exit(0)  # threads that imports have started do not keep us


if __name__ == "__main__":
    main()
