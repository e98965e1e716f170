"""Where a result comes from: the commit of this tree and the command that was typed. No torch."""

import shlex
import subprocess
import sys
from pathlib import Path

NOT_RECORDED = ("--out", "--commit", "--seconds")  # which differ from place to place


def commit() -> str:
    """Return the commit of Ithaca's own tree, marked if it has changes; 'unknown' if it has no history here."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent.parent
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # an installed Ithaca may lie in a repository of its user
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """Return the command that was typed, without where its results go and how long it may take."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in NOT_RECORDED:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in NOT_RECORDED)):
            kept.append(word)
    return shlex.join(["ithaca", *kept])
