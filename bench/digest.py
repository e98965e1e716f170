"""A digest of the code that a result was seen with: without docstrings and comments, which change no result."""

import ast
import io
import tokenize
from hashlib import sha256
from pathlib import Path


def digest(package: Path) -> str:
    """Of all files of a package; of its Python files only what runs."""
    found = sha256()
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = code_of(file.read_text()).encode() if file.suffix == ".py" else file.read_bytes()
            found.update(f"{file.relative_to(package)} {len(content)} ".encode() + content)
    return found.hexdigest()[:12]


def code_of(source: str) -> str:
    """The lines of a program without docstrings, comments and empty lines. All versions of Python find the same."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone documents what is around it, or before it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())
