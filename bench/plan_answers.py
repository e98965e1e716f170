"""Prove that a change of the code changed no answer of the planner, or show which: the same questions to two trees.

Over a hundred times `ithaca plan … --json`, over models, GPUs, lengths, recipes, host memory and disks, some of which
do not fit; then `ithaca mesh --json`, and `ithaca plan` as lines, a few times. Arithmetic alone: no GPU, no weights,
and every answer is what a user of the command line gets, its exit code and what it says on stderr among it.

    python -m bench.plan_answers --tree ../before --out before.json
    python -m bench.plan_answers --tree . --out after.json
    python -m bench.plan_answers --compare before.json after.json

`--compare` prints, question by question, which fields differ, with both values, then how many questions differ in each
field, and ends with code 1 where one does. What has another name on purpose can be told, and is no difference then:
`--renamed-key gradient=residual` for a field of the JSON, `--renamed-text plan.gradient=plan.residual` within texts.

Everything goes through `python -m ithaca`, within one process, so that the same file runs in both trees.
"""

import argparse
import contextlib
import difflib
import io
import json
import re
import runpy
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRESETS = ("tiny", "llama3.2-1b", "llama3.2-3b", "llama2-7b", "llama3-8b", "qwen3-8b", "qwen3-32b", "llama3-70b")
TOKENS = ("32K", "128K", "512K", "1M", "2M", "5M", "8M", "max")
KINDS = (
    "H100-80GB",
    "H200-141GB",
    "A100-40GB",
    "A100-80GB",
    "GH200-96GB",
    "B200-180GB",
    "RTX4090-24GB",
    "L40S-48GB",
)
COUNTS = (1, 2, 16, 64)  # 8 is everywhere else
RECIPES = ("dense", "ulysses", "alst", "untied", "ring", "hybrid", "fpdt", "sweep")

Answer = dict[str, Any]


# Questions ------------------------------------------------------------------------------------------------------------


def _plans() -> Iterator[str]:
    """The 128 that are answered as JSON."""
    for model in PRESETS:
        gpus = "16xH200-141GB" if model == "llama3-70b" else "8xH100-80GB"
        for tokens in TOKENS:
            yield f"plan {model} --gpus {gpus} --tokens {tokens}"
    for place, kind in enumerate(KINDS):
        for number, count in enumerate(COUNTS):
            # In turn, so that every kind has small and large models, short and long contexts
            model, tokens = PRESETS[(3 * place + 2 * number + 1) % 8], TOKENS[(place + 3 * number + 2) % 8]
            yield f"plan {model} --gpus {count}x{kind} --tokens {tokens}"
    for recipe in RECIPES:
        yield f"plan llama3-8b --gpus 8xH100-80GB --tokens 512K --recipe {recipe}"
        yield f"plan qwen3-32b --gpus 16xH200-141GB --tokens max --recipe {recipe}"
    for host in ("128GB", "512GB", "4TB"):
        for disk in ("0", "4TB", "28TB"):
            yield f"plan llama3-8b --gpus 8xH100-80GB --tokens 4M --host {host} --disk {disk}"
    for words in (
        "llama3-8b --gpus 8xH100-80GB --host 128GB --disk 28TB --tokens max",
        "llama3-8b --gpus 1xH200-141GB --host 125GB --tokens 128K",
        "llama3-8b --gpus 1xH200-141GB --host 125GB --disk 4TB --tokens max",
        "llama3-70b --gpus 16xH200-141GB --disk 28TB --tokens 2M",
        "llama3-70b --gpus 64xA100-80GB --node-gpus 4 --tokens 1M",
        "qwen3-32b --gpus 16xH100-80GB --node-gpus 4 --tokens max --recipe hybrid",
        "llama3.2-1b --gpus 2xRTX4090-24GB --node-gpus 2 --host 64GB --tokens max",
        "llama3.2-3b --gpus 8xL40S-48GB --host 256GB --disk 2TB --tokens 1M --recipe sweep",
        "qwen3-8b --gpus 8xB200-180GB --tokens 64M",
    ):
        yield f"plan {words}"


def _others() -> Iterator[str]:
    """As lines, and from the planner's smaller sister."""
    for words in (
        "llama3-8b --gpus 8xH100-80GB --tokens 5M",
        "llama3-8b --gpus 8xH100-80GB --tokens 64M",
        "qwen3-32b --gpus 16xH200-141GB",
        "llama3.2-1b --gpus 1xRTX4090-24GB --tokens 128K",
        "llama3-70b --gpus 64xH100-80GB --tokens 2M --disk 28TB",
        "llama3-8b --gpus 8xH100-80GB --tokens 512K --recipe untied",
        "llama3-70b --gpus 1xA100-40GB --tokens 32K",
        "llama3-8b --gpus 8xH100-80GB --tokens 512K --recipe swep",
    ):
        yield f"plan {words}"
    for words in (
        "llama3-8b --nodes 2 --gpus 8 --tokens 5M",
        "llama3-8b --nodes 1 --gpus 8 --tokens 1M --recipe ulysses",
        "qwen3-32b --nodes 4 --gpus 8 --tokens 8M --recipe hybrid",
        "llama3-70b --nodes 8 --gpus 8 --tokens 2M --share 32",
    ):
        yield f"mesh {words} --json"


def _questions() -> list[str]:
    plans = [f"{words} --json" for words in _plans()]
    asked = [*plans, *_others()]
    assert len(set(asked)) == len(asked), "a question is asked twice"
    return asked


# Answers --------------------------------------------------------------------------------------------------------------


def _ask(question: str) -> Answer:
    """What `python -m ithaca QUESTION` does, within this process."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["ithaca", *shlex.split(question)]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("ithaca", run_name="__main__", alter_sys=False)
    except SystemExit as ended:
        code = ended.code or 0
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        sys.argv = before
    said: Any = out.getvalue()
    if question.endswith("--json"):
        with contextlib.suppress(ValueError):
            said = json.loads(said)
    if isinstance(said, str):
        said = said.splitlines()
    return {"code": code, "err": err.getvalue(), "out": said}


def run(tree: Path, out: Path, only: str) -> int:
    sys.path.insert(0, str(tree.resolve()))
    import ithaca

    found = Path(ithaca.__file__).resolve()
    if not found.is_relative_to(tree.resolve()):
        raise SystemExit(f"ithaca was imported from {found}, not from {tree}: does it hold a folder ithaca?")
    begun, answers = time.monotonic(), {}
    questions = [question for question in _questions() if only in question]
    for number, question in enumerate(questions, start=1):
        since = time.monotonic()
        answers[question] = _ask(question)
        code = answers[question]["code"]
        said = f", code {code}" if code else ""
        print(f"{number}/{len(questions)} {time.monotonic() - since:.1f} s {question}{said}", flush=True)
    out.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    crashed = sum(isinstance(answer["code"], str) for answer in answers.values())
    refused = sum(answer["code"] not in (0, None) for answer in answers.values()) - crashed
    print(
        f"{len(answers)} questions in {time.monotonic() - begun:.0f} s, {refused} answered with a refusal, {crashed} "
        f"ended in an error of the program: {out}"
    )
    return 1 if crashed else 0


# Differences ----------------------------------------------------------------------------------------------------------


def _renamed(value: Any, keys: dict[str, str], texts: dict[str, str]) -> Any:
    """An old answer with the new names."""
    if isinstance(value, dict):
        return {keys.get(name, name): _renamed(inner, keys, texts) for name, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, keys, texts) for inner in value]
    if isinstance(value, str):
        for old, new in texts.items():
            value = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _, new=new: new, value)
    return value


def _differences(before: Any, after: Any, path: str) -> Iterator[tuple[str, str]]:
    """Where two answers differ, and how."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            inner = f"{path}.{name}" if path else name
            if name not in after:
                yield inner, f"{_short(before[name])} → not there"
            elif name not in before:
                yield inner, f"not there → {_short(after[name])}"
            else:
                yield from _differences(before[name], after[name], inner)
        if before.keys() == after.keys() and list(before) != list(after):
            yield f"{path} (order)", f"{', '.join(before)} → {', '.join(after)}"
    elif isinstance(before, list) and isinstance(after, list):
        for number, (first, second) in enumerate(zip(before, after, strict=False)):
            yield from _differences(first, second, f"{path}[{number}]")
        if len(before) != len(after):
            more, word = (before, "gone") if len(before) > len(after) else (after, "new")
            for number in range(min(len(before), len(after)), len(more)):
                yield f"{path}[{number}]", f"{word}: {_short(more[number])}"
    elif before != after or type(before) is not type(after):
        yield path, _change(before, after)


def _change(before: Any, after: Any) -> str:
    if isinstance(before, str) and isinstance(after, str) and len(before) + len(after) > 120:
        return _changed_words(before, after)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    share = f" ({after / before - 1:+.2%})" if numbers and before else ""
    return f"{_short(before)} → {_short(after)}{share}"


def _changed_words(before: str, after: str) -> str:
    """Of two long texts, the words in which they differ."""
    first, second = before.split(" "), after.split(" ")
    changes = []
    for kind, a, b, c, d in difflib.SequenceMatcher(a=first, b=second, autojunk=False).get_opcodes():
        if kind != "equal":
            changes.append(f"'{' '.join(first[a:b])}' → '{' '.join(second[c:d])}'")
    return "; ".join(changes)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:160] + "…"


def compare(first: Path, second: Path, keys: dict[str, str], texts: dict[str, str]) -> int:
    before, after = (json.loads(file.read_text()) for file in (first, second))
    fields: Counter[str] = Counter()
    differing, asked = 0, list(dict.fromkeys((*before, *after)))
    for question in asked:
        old = _renamed(before.get(question, {}), keys, texts)
        found = list(_differences(old, after.get(question, {}), ""))
        if found:
            differing += 1
            print(f"ithaca {question}")
            for path, change in found:
                print(f"  {path.removeprefix('out.')}: {change}")
        fields.update({re.sub(r"\[\d+\]", "[]", path).removeprefix("out.") for path, _ in found})
    if not differing and asked:
        print(f"{len(asked)} questions: identical")
        return 0
    print(f"{len(asked)} questions: {differing} differ")
    for path, count in fields.most_common():
        print(f"  {path}: {count}")
    return 1


def _pairs(given: list[str]) -> dict[str, str]:
    return {old: new for old, _, new in (pair.rpartition("=") for pair in given)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(), metavar="DIR", help="whose ithaca is asked; this folder's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the answers go")
    parser.add_argument("--only", default="", metavar="WORD", help="questions with this in them")
    parser.add_argument("--list", action="store_true", help="print the questions and ask none")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="two files of answers")
    parser.add_argument("--renamed-key", action="append", default=[], metavar="OLD=NEW", help="a field of the JSON")
    parser.add_argument("--renamed-text", action="append", default=[], metavar="OLD=NEW", help="words within texts")
    options = parser.parse_args()
    if options.compare:
        first, second = options.compare
        return compare(first, second, _pairs(options.renamed_key), _pairs(options.renamed_text))
    if options.list:
        print("\n".join(f"ithaca {question}" for question in _questions() if options.only in question))
        return 0
    if options.out is None:
        parser.error("--out FILE is needed, for the answers")
    return run(options.tree, options.out, options.only)


if __name__ == "__main__":
    sys.exit(main())
