"""How long conversations take: an agent's long trajectory, and many short ones, by template and by process.

    python -m bench.chats --calls 400 --short 1000

Prints seconds of computing, of the process that renders and of the one that encodes, so that other work on the machine
counts little. The templates are those of the tests, plain and with the generation tag; the text is Python's source.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from ithaca.data.chat.render import Renderer
from ithaca.data.chat.template import load_format
from ithaca.data.preparation.encode import Encoding, encode
from ithaca.data.preparation.records import document
from ithaca.data.preparation.tokenizer import load_tokenizer
from tests.data.chat_styles import STYLES, TOOLS, marked, plain, save_tokenizer

TEXT = Path(json.__file__).read_text(encoding="utf-8")


def _excerpt(chance: random.Random, length: int) -> str:
    start = chance.randrange(len(TEXT) - length)
    return TEXT[start : start + length]


def trajectory(calls: int) -> dict[str, Any]:
    """One question, then so many calls of a tool with answers of 600 characters."""
    chance = random.Random(0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the bug."}]
    for number in range(calls):
        call = {"type": "function", "function": {"name": "sh", "arguments": {"command": f"sed -n {number}p file.py"}}}
        messages.append({"role": "assistant", "content": "I look.", "reasoning_content": "So.", "tool_calls": [call]})
        messages.append({"role": "tool", "content": _excerpt(chance, 600)})
    messages.append({"role": "assistant", "content": "Done.", "reasoning_content": "So."})
    return {"messages": messages, "tools": TOOLS * 10}


def short(count: int) -> list[dict[str, Any]]:
    """Conversations of three questions of 300 characters, answered with 1000."""
    chance = random.Random(0)
    turns = (("user", 300), ("assistant", 1000)) * 3
    return [
        {"messages": [{"role": role, "content": _excerpt(chance, length)} for role, length in turns]}
        for _ in range(count)
    ]


def measure(folder: Path, template: str, records: list[dict[str, Any]]) -> str:
    """Return samples, tokens and seconds of computing as a line."""
    (folder / "chat_template.jinja").write_text(template)
    encoding = Encoding(load_tokenizer(folder), mixed=True, chats=Renderer(load_format(folder, None, None)))
    rendering, encoding_began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.process_time()
    found = list(encode([document(str(number), record) for number, record in enumerate(records)], encoding))
    encoded = time.process_time() - encoding_began
    encoding.close()  # and only then its time counts
    rendering = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - rendering
    tokens = sum(len(part) for one in found for part in one.parts)
    return f"{len(found):6} samples {tokens:9} tokens   rendering {rendering:6.2f} s   encoding {encoded:6.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="calls of a tool in the long conversation")
    parser.add_argument("--short", type=int, default=1000, help="short conversations")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = save_tokenizer(Path(place))
        for name, records in (("long", [trajectory(options.calls)]), ("short", short(options.short))):
            for style, template in STYLES.items():
                for kind in (plain, marked):
                    print(f"{name:6}{style:8}{kind.__name__:7}", measure(folder, kind(template), records), flush=True)


if __name__ == "__main__":
    main()
