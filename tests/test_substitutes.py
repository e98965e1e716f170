"""A test that replaces a function of a module under a name that nobody has tests nothing."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def modules(tree: ast.AST) -> dict[str, str]:
    """The modules of Ithaca that a file imports, by the names that it has for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ithaca"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if (TESTS.parent / name.replace(".", "/")).with_suffix(".py").exists():
                    found[alias.asname or alias.name] = name
    return found


def replaced(path: Path) -> Iterator[tuple[str, str]]:
    """Module and attribute of every assignment `module.attribute = …`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = modules(tree)
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names:
                yield names[target.value.id], target.attr


def test_what_tests_replace_is_there() -> None:
    every = {(module, name) for path in TESTS.rglob("*.py") for module, name in replaced(path)}
    assert len(every) > 20
    gone = [f"{module}.{name}" for module, name in every if not hasattr(importlib.import_module(module), name)]
    assert gone == []
