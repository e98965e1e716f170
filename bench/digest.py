"""A digest of the code that a result was seen with: without docstrings and comments, which change no result."""

import ast
import io
import subprocess
import tokenize
from hashlib import sha256
from pathlib import Path


def digest(package: Path) -> str:
    """Of all files of a package; of its Python files only what runs."""
    found = sha256()
    for file in sorted(package.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = _what_runs(file, file.read_bytes())
            found.update(f"{file.relative_to(package)} {len(content)} ".encode() + content)
    return found.hexdigest()[:12]


def changed_since(package: Path, commit: str) -> list[str] | None:
    """The files of a package whose code is not that of a commit; None if this tree has no such commit."""

    def git(*words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["git", *words], cwd=package, capture_output=True)

    listed = git("diff", "--no-renames", "--name-only", "--relative", commit, "--", ".")
    if listed.returncode:
        return None
    found = []
    for name in listed.stdout.decode().splitlines():
        file, before = package / name, git("show", f"{commit}:./{name}")
        now = _what_runs(file, file.read_bytes()) if file.exists() else None
        if now != (_what_runs(file, before.stdout) if before.returncode == 0 else None):
            found.append(name)
    return found


def _what_runs(file: Path, content: bytes) -> bytes:
    return code_of(content.decode()).encode() if file.suffix == ".py" else content


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
