"""Configurations: TOML files and --set. Kinds of options and what they accept are those of docs/training.md."""

import random
from pathlib import Path

from tests.fuzz.recipe import SHORT, SMALL, Expected, Input, Toys, all_of, copies, numbered, shown, train, writes

# Option -> its kind, from the table of options
KINDS = {
    "model.source": "path",
    "model.dtype": "word",
    "model.seed": "seed",
    "data.source": "path",
    "plan.recipe": "word",
    "plan.checkpoint": "word",
    "plan.heads": "count",
    "plan.travel": "word",
    "plan.chunk": "tokens",
    "plan.tile": "tokens",
    "plan.x": "word",
    "plan.o": "word",
    "plan.lse": "word",
    "plan.residual": "word",
    "plan.kv": "word",
    "plan.zero": "choice",
    "plan.optimizer": "word",
    "plan.kernel": "word",
    "plan.loss_tile": "tokens",
    "plan.host_memory": "bytes",
    "plan.disk": "path",
    "mesh.replicate": "count",
    "mesh.shard": "count",
    "mesh.ring": "count",
    "mesh.ulysses": "count",
    "train.tokens": "tokens",
    "train.batch": "count",
    "train.micro_batch": "count",
    "train.steps": "count",
    "train.epochs": "rate",
    "train.learning_rate": "rate",
    "train.schedule": "word",
    "train.warmup": "whole",
    "train.decay": "share",
    "train.final_rate": "share",
    "train.weight_decay": "rate",
    "train.beta1": "share",
    "train.beta2": "share",
    "train.clip": "rate",
    "train.seed": "seed",
    "train.device": "word",
    "run.checkpoint_every": "whole",
    "run.keep": "count",
    "run.report": "word",
    "run.timeout": "rate",
    "train.micro": "count",
    "run.patience": "rate",
    "plan.gradient": "word",
}
NUMBERS = {"count", "tokens", "choice", "bytes", "rate", "whole", "share", "seed"}
# Nonsense for a number, whatever it counts
NO_NUMBER = [" ", "nan", "inf", "-inf", "-1", "abc", "[]", "[1]", "{}", "null", "1 2", "1e400", "0,5", "--1", "1;2"]
NO_NUMBER += ["½", "\udcff", "a" * 5000, "{0}", "%s", "1\n2", "'1", "\x1b[31m1", "2024-01-01", "9" * 5000]
NO_WHOLE = ["1.5", "0.5", "1e-3", "true"]
NO_WORD = [
    " ",
    "nan",
    "-1",
    "0",
    "Cpu ",
    "abc",
    "[]",
    "a" * 5000,
    "\udcff",
    "true",
    "1e400",
    "sweep,",
    ",",
    "*",
    "host*",
]
NO_WORD += ["host*-1", "host*0", "host*99999999999", "rebuild*x", "none none", "../..", "\x1b[31m", "dense\n"]
NO_PATH = [
    "missing",
    "missing/",
    "../missing",
    "~/missing",
    "/dev/full",
    "/proc/self/mem",
    "\udcff",
    "a" * 300,
    "a/" * 3000,
]
NO_PATH += ["model/config.json", "good.tokens/x", ".", "/", "%s", "{}", "[1]", "1", "true", "http://localhost/x"]


def wrong_values(option: str) -> list[str]:
    """Values that the table rules out."""
    kind = KINDS[option]
    if kind == "word":
        return [value for value in NO_WORD if not (option in ("plan.x", "plan.o") and value == "host*0")]
    if kind == "path":
        return NO_PATH if option != "plan.disk" else ["missing", "good.tokens", "\udcff", "a" * 300]
    values = NO_NUMBER if kind != "seed" else [value for value in NO_NUMBER if value != "-1"]
    if kind in ("count", "tokens", "choice", "whole", "seed"):
        values = values + NO_WHOLE
    if kind in ("count", "tokens", "choice"):
        values = [*values, "0", "-64K"]
    if kind == "share":
        values = [*values, "1.0000001", "2", "1e9"]
    return values


def recipe_for(option: str) -> tuple[str, ...]:
    """The recipe under which the table offers an option of the Plan, so that its value is what is wrong."""
    recipes = {"plan.heads": "untied", "plan.checkpoint": "dense", "plan.travel": "ring"}
    if not option.startswith("plan.") or option == "plan.recipe":
        return ()
    return ("--set", f"plan.recipe={recipes.get(option, 'sweep')}")


SOUND = copies("model", "good.tokens")


def set_wrong_values(chance: random.Random) -> list[Input]:
    found = []
    for option in KINDS:
        values = wrong_values(option)
        for value in chance.sample(values, min(6, len(values))):
            words = train(*recipe_for(option), "--set", f"{option}={value}")
            expect: Expected = "either" if option == "plan.kernel" and value == " " else "error"
            found.append(Input(f"{option}={shown(value)}", words, SOUND, expect))
    return numbered("set-wrong", found)


def set_empty_values(chance: random.Random) -> list[Input]:
    """An option without a value."""
    found = [Input(f"{option}=", train(*recipe_for(option), "--set", f"{option}="), SOUND) for option in KINDS]
    return numbered("set-empty", found)


def set_wrong_names(chance: random.Random) -> list[Input]:
    """What is no KEY=VALUE, or names no option."""
    wrong = ["", "=", "a", "a=b", ".=1", "train.=1", ".steps=1", "train.steps", "train..steps=1", "train.steps.x=1"]
    wrong += ["TRAIN.STEPS=1", "train.step=1", "train=1", "train={}", "plan=auto", "[train]=1", "train.steps =1"]
    wrong += [
        "__class__.x=1",
        "train.__class__=1",
        "train.__dict__={}",
        "run.folder=x",
        "\udcff.x=1",
        "x" * 9999 + "=1",
    ]
    wrong += [
        "train.steps=1=2",
        "train.steps==1",
        " train.steps=1",
        "train.steps=1,train.batch=1",
        "model.spec=x",
        "🜚=1",
    ]
    wrong += ["plan.recipes=sweep", "mesh.data=1", "optimizer.lr=1", "train.learning-rate=1", "data.sources=x"]
    either = {"train.steps =1", " train.steps=1"}
    found = [Input(shown(w), train("--set", w), SOUND, "either" if w in either else "error") for w in wrong]
    return numbered("set-name", found)


TYPED = ["true", "1.5", '"abc"', "[1]", "[]", "{a = 1}", "1979-05-27", "12:00:00", "nan", "inf", "-inf", "-1", "''"]
TYPED += [
    '"""x\ny"""',
    "0x7fffffffffffffffffff",
    "1e400",
    '"\\u0000"',
    "[[[]]]",
    '["host", 3]',
    '{"" = 1}',
    "-0",
    "99e99",
]

LARGE_OR_SMALL = ("''", "-0", "1.5", "99e99", "-1", "true", "0x7fffffffffffffffffff")  # which some options accept


def toml_types(chance: random.Random) -> list[Input]:
    """Every option with values of other types."""
    found = []
    for option, kind in KINDS.items():
        table, _, name = option.partition(".")
        for value in chance.sample(TYPED, 5):
            if (option, value) == ("train.steps", "0x7fffffffffffffffffff"):
                continue  # it would train for so many steps
            text = f"[{table}]\n{name} = {value}\n"
            if recipe_for(option):
                text = text.replace("\n", f'\nrecipe = "{recipe_for(option)[1].partition("=")[2]}"\n', 1)
            wrong = kind in NUMBERS and value not in LARGE_OR_SMALL
            options = tuple(item for item in SHORT if not item.startswith(f"{option}="))
            words = ("train", "config.toml", "--run", "run", "--ranks", "1")
            for item in (*options, *(() if option == "model.source" else ("model.source=model",))):
                words = (*words, "--set", item)
            if option != "data.source":
                words = (*words, "--set", "data.source=good.tokens")
            build = all_of(SOUND, writes("config.toml", text))
            found.append(Input(f"{option} = {shown(value)}", words, build, "error" if wrong else "either"))
    return numbered("toml-type", found)


def toml_files(chance: random.Random) -> list[Input]:
    """Files that are no TOML, no configuration, or no file."""
    good = b'[train]\nsteps = 1\n[model]\nsource = "model"\n'
    bad: dict[str, bytes] = {
        "not TOML": b"steps: 1\n",
        "binary": bytes(range(256)),
        "invalid UTF-8": b'[model]\nsource = "\xff\xfe"\n',
        "UTF-16": "[train]\nsteps = 1\n".encode("utf-16"),
        "zero bytes": b"\0" * 4096,
        "a value for a table": b"train = 3\n",
        "a list for a table": b"train = []\n",
        "a list of tables": b"[[train]]\nsteps = 1\n",
        "the same table twice": b"[train]\nsteps=1\n[train]\nsteps=2\n",
        "the same key twice": b"[train]\nsteps=1\nsteps=2\n",
        "an unknown table": b"[optimizer]\nlr=1\n",
        "an option outside a table": b"steps = 1\n",
        "a table in a table": b"[train.batch]\nx=1\n",
        "a dotted unknown": b'"train.steps" = 1\n',
        "deep list": b"[train]\nsteps = " + b"[" * 20000 + b"]" * 20000,
        "deep table": b"[train]\nsteps = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
        "deep name": b"a." * 20000 + b"b = 1\n",
        "a long number": b"[train]\nsteps = " + b"9" * 5000,
        "a long line": b'[model]\nsource = "' + b"x" * 3_000_000 + b'"\n',
        "cut in a string": b'[model]\nsource = "mod',
        "an escape": b'[model]\nsource = "\\q"\n',
        "an empty key": b'[train]\n"" = 1\n',
        "JSON": b'{"train": {"steps": 1}}',
    }
    words = ("train", "config.toml", "--run", "run", "--ranks", "1", *SMALL)
    found = [Input(name, words, all_of(SOUND, writes("config.toml", data)), "error") for name, data in bad.items()]
    fine = {
        "empty": b"",
        "a comment": b"# nothing\n",
        "empty tables": b"[train]\n[plan]\n[mesh]\n[run]\n[data]\n[model]\n",
    }
    found += [Input(name, words, all_of(SOUND, writes("config.toml", data)), "ok") for name, data in fine.items()]
    found.append(Input("BOM", words, all_of(SOUND, writes("config.toml", b"\xef\xbb\xbf" + good))))
    for number in range(12):
        data = bytearray(good * 3)
        for _ in range(3):
            data[chance.randrange(len(data))] = chance.randrange(256)
        found.append(Input(f"random bytes {number}", words, all_of(SOUND, writes("config.toml", bytes(data)))))
    for name, build in PLACES.items():
        found.append(Input(name, words, all_of(SOUND, build), "error"))
    for path in ("/dev/null", "/dev/zero", "/proc/self/mem", "\udcff.toml", "a" * 300, ""):
        expect: Expected = "either" if path in ("/dev/null", "") else "error"
        found.append(Input(f"the path {shown(path)}", ("train", path, *words[2:]), SOUND, expect))
    return numbered("toml-file", found)


def _folder(folder: Path, toys: Toys) -> None:
    (folder / "config.toml").mkdir()


def _dangling(folder: Path, toys: Toys) -> None:
    (folder / "config.toml").symlink_to("nowhere")


def _loop(folder: Path, toys: Toys) -> None:
    (folder / "config.toml").symlink_to("config.toml")


PLACES = {"a folder": _folder, "a dangling link": _dangling, "a link to itself": _loop}


def together(chance: random.Random) -> list[Input]:
    """Options that are sound alone and not together, from the pages on Plans and ranks."""
    wrong = [
        "train.batch=3 train.micro_batch=2",
        "train.batch=2 train.micro_batch=4",
        "mesh.ulysses=2",
        "mesh.ring=2",
        "mesh.shard=2",
        "mesh.replicate=2",
        "mesh.ulysses=7 plan.recipe=ulysses",
        "plan.recipe=dense plan.chunk=64",
        "plan.recipe=dense plan.travel=around",
        "plan.recipe=auto plan.zero=2",
        "plan.recipe=ulysses plan.heads=2",
        "plan.recipe=sweep plan.checkpoint=full",
        "plan.recipe=sweep plan.x=disk",
        "plan.recipe=sweep plan.x=rebuild",
        "plan.recipe=sweep plan.lse=disk",
        "plan.recipe=sweep plan.kv=disk",
        "plan.recipe=sweep plan.residual=rebuild",
        "plan.recipe=dense plan.x=rebuild",
        "plan.recipe=sweep plan.host_memory=1",
        "plan.recipe=alst plan.kernel=cudnn",
        "plan.recipe=sweep plan.residual=host plan.gradient=device",
        "train.micro=1 train.micro_batch=1",
        "model.dtype=float16",
        "train.device=cuda",
    ]
    fine = [
        "train.warmup=100",
        "train.tokens=1000",
        "plan.recipe=sweep plan.chunk=7 plan.tile=3 plan.loss_tile=5",
        "plan.recipe=sweep plan.chunk=100M",
        "plan.recipe=untied plan.heads=6",
        "plan.recipe=hybrid",
        "model.dtype=float64",
        "plan.zero=1",
        "train.schedule=wsd train.decay=1 train.final_rate=0",
        "run.checkpoint_every=0 run.keep=1",
    ]
    doubtful = {
        "plan.recipe=sweep plan.chunk=100M",
        "plan.recipe=sweep plan.x=rebuild",
        "plan.recipe=sweep plan.host_memory=1",
    }
    doubtful |= {"plan.recipe=sweep plan.residual=host plan.gradient=device", "train.micro=1 train.micro_batch=1"}
    found = []
    for group, promised in ((wrong, "error"), (fine, "ok")):
        for items in group:
            expect: Expected = "either" if items in doubtful else promised  # pyrefly: ignore
            more = [word for item in items.split() for word in ("--set", item)]
            found.append(Input(items, train(*more), SOUND, expect))
    return numbered("together", found)


MUTATORS = [set_wrong_values, set_empty_values, set_wrong_names, toml_types, toml_files, together]
