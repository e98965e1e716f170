"""Command lines: options with values that `--help` and the pages rule out, and a few that they allow."""

import random
from pathlib import Path

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, nothing, numbered, shown, train, writes

NO_COUNT = ["0", "-1", "abc", "", " ", "1.5", "nan", "1e3", "99999999999999999999", "0x2", "\udcff", "٣x", "2 2"]
NO_LENGTH = ["0", "-1", "abc", "", " ", "nan", "inf", "1e999", "K", "-64K", "1K1K", "64KB!", "1.5.2M", "\udcff", "1/2"]
NO_LENGTH += ["9" * 400, "127.9999", "64 K K", "max max", "0K", "0.0000001K", "1e3000M", "a" * 5000]
NO_SIZE = ["-1GB", "abc", "nan", "inf", "GB", "1XB", "1e999GB", "-0.1", "\udcff", "1GBGB", "9" * 400 + "GB", "[1]"]
SOUND = copies("model", "good.tokens")


def train_options(chance: random.Random) -> list[Input]:
    found = [Input(f"--ranks {shown(value)}", train("--ranks", value), SOUND, "error") for value in NO_COUNT]
    found += [Input(f"--nodes {shown(value)}", train("--nodes", value), SOUND, "error") for value in NO_COUNT]
    for value in ("", ":", "host:", "host:65536", "a b", "\udcff", "//", "[::1", "x" * 5000, "no.such.host.invalid:1"):
        found.append(Input(f"--meet {shown(value)}", train("--nodes", "2", "--meet", value), SOUND, "error"))
    found.append(Input("--nodes 2 alone", train("--nodes", "2"), SOUND, "error"))
    found.append(Input("--meet alone", train("--meet", "localhost:29500"), SOUND, "error"))
    found.append(Input("--fresh without a run", train("--fresh"), SOUND, "ok"))
    found.append(Input("--ranks 3 of one sequence", train("--set", "train.batch=2", "--ranks", "3"), SOUND))
    return numbered("train-option", found)


def _read_only(folder: Path, toys: Toys) -> None:
    (folder / "run").symlink_to("/proc")


def _link_to_itself(folder: Path, toys: Toys) -> None:
    (folder / "run").symlink_to("run")


def _dangling(folder: Path, toys: Toys) -> None:
    (folder / "run").symlink_to("elsewhere/run")


def train_run_folders(chance: random.Random) -> list[Input]:
    """Where a run cannot be."""
    paths = ["/dev/null", "/dev/null/run", "/proc/run", "model/config.json", "good.tokens/run", "a" * 300, "x/" * 3000]
    found = [Input(f"--run {shown(path)}", train(run=path), SOUND, "error") for path in paths]
    found += [Input(f"--run {shown(path)}", train(run=path), SOUND) for path in ("", ".", "..", "\udcff", "a/b/c", "🜚")]
    for path in (*paths, "", ".", "\udcff", "model", "missing", "run"):
        found.append(Input(f"--from {shown(path)}", train("--from", path), SOUND, "error"))
    for name, build in {
        "a file": writes("run", b"x"),
        "a link to /proc": _read_only,
        "a link to itself": _link_to_itself,
    }.items():
        found.append(Input(f"--run is {name}", train(), all_of(SOUND, build), "error"))
    found.append(Input("--run is a dangling link", train(), all_of(SOUND, _dangling)))
    strange: dict[str, Build] = {
        "other files": writes("run/thesis.txt", b"years of work"),
        "an empty config.toml": writes("run/config.toml", b""),
        "checkpoints as a file": writes("run/checkpoints", b""),
        "only metrics": writes("run/metrics.jsonl", b'{"step": 1}\n'),
        "only a lock": writes("run/lock", b"1"),
    }
    for name, build in strange.items():
        found.append(Input(f"--run has {name}", train(), all_of(SOUND, build)))
        found.append(Input(f"--run has {name}, --fresh", train("--fresh"), all_of(SOUND, build)))
        found.append(Input(f"export of {name}", ("export", "run", "out"), all_of(SOUND, build), "error"))
    return numbered("run-place", found)


def any_command(chance: random.Random) -> list[Input]:
    """What no command has."""
    found = [
        Input(shown(words), words, expect="error")
        for words in [
            ("nonsense",),
            ("",),
            ("--nonsense",),
            ("-x",),
            ("trian",),
            ("\udcff",),
            ("train", "a", "b"),
            ("plan",),
            ("data",),
            ("export",),
            ("export", "a"),
            ("export", "a", "b", "c"),
            ("rehearse",),
            ("train", "--nonsense"),
            ("plan", "tiny", "-z"),
            ("train", "--set"),
            ("train", "--run"),
            ("plan", "tiny", "--gpus"),
            ("data", "x", "--out"),
            ("mesh",),
            ("export", "--dtype"),
            ("train", "--ranks"),
            ("plan", "--json"),
            ("data", "--stats"),
            ("train", "--fresh=2"),
        ]
    ]
    found += [
        Input(shown(words), words, expect="ok")
        for words in [
            ("--help",),
            ("--version",),
            ("train", "--help"),
            ("plan", "--help"),
            ("data", "--help"),
            ("export", "--help"),
            ("rehearse", "--help"),
        ]
    ]
    return numbered("usage", found)


def plan_lengths(chance: random.Random) -> list[Input]:
    wrong = [*NO_LENGTH, "1", "127", "4097M", "1e30", "99999G"]
    found = []
    for value in wrong:
        more = chance.choice([(), ("--json",), ("--meshes",), ("--recipe", "sweep"), ("--verbose",)])
        found.append(
            Input(f"--tokens {shown(value)} {more}", ("plan", "tiny", "--tokens", value, *more), expect="error")
        )
    for value in ["128", "64K", "1M", "100000", "max", "4096M"]:
        found.append(Input(f"--tokens {value}", ("plan", "tiny", "--gpus", "8xH100-80GB", "--tokens", value)))
    return numbered("plan-length", found)


def plan_gpus(chance: random.Random) -> list[Input]:
    wrong = [
        "",
        " ",
        "x",
        "8",
        "8x",
        "xH100-80GB",
        "0xH100-80GB",
        "-1xH100-80GB",
        "1.5xH100-80GB",
        "8xH1000",
        "8xx8xH100-80GB",
    ]
    wrong += [
        "8x8x8xH100-80GB",
        "0x8xH100-80GB",
        "8x0xH100-80GB",
        "2000000xH100-80GB",
        "9" * 400 + "xH100-80GB",
        "\udcff",
    ]
    wrong += [
        "nanxH100-80GB",
        "8 x H100-80GBx",
        "8xH100-80GB,8xH200",
        "8xT4",
        "8x[H100-80GB]",
        "8xH",
        "8*H100-80GB",
        "a" * 5000,
    ]
    found = []
    for value in wrong:
        more = chance.choice([(), ("--json",), ("--meshes",), ("--tokens", "64K"), ("--verbose",)])
        expect: Expected = "either" if value == "8xH" else "error"
        found.append(Input(f"--gpus {shown(value)} {more}", ("plan", "tiny", "--gpus", value, *more), expect=expect))
    fine = ["1xH100-80GB", "3xL40S-48GB", "7x5xA100-40GB", "H100-80GB", "8xh100-80gb", "8xH200", "1048576xH100-80GB"]
    found += [Input(f"--gpus {value}", ("plan", "tiny", "--gpus", value, "--tokens", "64K")) for value in fine]
    return numbered("plan-gpus", found)


def plan_options(chance: random.Random) -> list[Input]:
    base = ("plan", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M")
    found = []
    for option in ("--host", "--disk"):
        for value in chance.sample([*NO_SIZE, "1e-30"], 9):
            expect: Expected = "either" if value in ("1e-30", "") else "error"
            found.append(Input(f"{option} {shown(value)}", (*base, option, value), expect=expect))
        found += [
            Input(f"{option} {value}", (*base, option, value)) for value in ("0", "1", "1KB", "1e30", "99999TB", "")
        ]
    for value in ("abc", "", "auto", "SWEEP", "sweep,ring", "dense dense", "\udcff", "a" * 5000):
        expect = "either" if value in ("auto", "SWEEP", "") else "error"
        found.append(Input(f"--recipe {shown(value)}", (*base, "--recipe", value), expect=expect))
        found.append(Input(f"--recipe {shown(value)} --meshes", (*base, "--meshes", "--recipe", value), expect=expect))
    for model in (
        "",
        " ",
        "llama4",
        "missing",
        "/",
        ".",
        "/dev/null",
        "/dev/zero",
        "\udcff",
        "a" * 5000,
        "tiny/",
        "x" * 300,
    ):
        expect = "either" if model == "tiny/" else "error"
        found.append(Input(f"model {shown(model)}", ("plan", model, "--tokens", "64K"), expect=expect))
        found.append(Input(f"model {shown(model)} --json", ("plan", model, "--tokens", "64K", "--json"), expect=expect))
    for picture in (
        "x.txt",
        "x",
        "missing/x.png",
        "",
        ".",
        "/dev/full",
        "x.PNG",
        "\udcff.png",
        "a" * 300 + ".png",
        ".png",
    ):
        expect = "either" if picture in ("", "x", ".png", "x.PNG", "\udcff.png") else "error"
        found.append(Input(f"--picture {shown(picture)}", ("plan", "tiny", "--picture", picture), expect=expect))
    found.append(Input("--measure without a GPU", ("plan", "tiny", "--measure", "rates.toml"), expect="error"))
    found.append(Input("--node-gpus 0", (*base, "--node-gpus", "0"), expect="error"))
    found.append(Input("--node-gpus 3", (*base, "--node-gpus", "3")))
    found.append(Input("mesh", ("mesh", "llama3-8b", "--gpus", "16xH100-80GB", "--tokens", "1M")))
    return numbered("plan-option", found)


def rehearsals(chance: random.Random) -> list[Input]:
    base = ("rehearse", "tiny", "--tokens", "256", "--ranks", "2", "--layers", "1")
    found = [Input("the pages'", base, expect="ok"), Input("--json", (*base, "--json"), expect="ok")]
    for option, values in (("--ranks", NO_COUNT), ("--layers", [*NO_COUNT, "5", "100"])):
        for value in chance.sample(values, 8):
            found.append(Input(f"{option} {shown(value)}", (*base, option, value), expect="error"))
    found += [
        Input(f"--tokens {shown(v)}", (*base, "--tokens", v), expect="error") for v in chance.sample(NO_LENGTH, 12)
    ]
    found += [Input(f"--cap {shown(v)}", (*base, "--cap", v), expect="error") for v in chance.sample(NO_SIZE, 6)]
    found += [Input(f"--cap {v}", (*base, "--cap", v)) for v in ("0", "1", "1KB", "80GB")]
    wrong = [
        "train.steps=1",
        "model.dtype=float32",
        "plan.chunk=0",
        "plan.x=nowhere",
        "mesh.ulysses=3",
        "mesh.ring=0",
        "=",
        "x",
    ]
    wrong += ["plan.recipe=nonsense", "mesh.shard=7", "plan.zero=4", "plan.heads=1", "plan.loss_tile=-1", "\udcff=1"]
    found += [Input(f"--set {shown(item)}", (*base, "--set", item), expect="error") for item in wrong]
    for recipe in ("dense", "ulysses", "alst", "untied", "ring", "hybrid", "fpdt", "sweep"):
        found.append(Input(f"--recipe {recipe}", (*base, "--recipe", recipe, "--memory-only")))
    for recipe in ("abc", "", "auto", "\udcff"):
        found.append(Input(f"--recipe {shown(recipe)}", (*base, "--recipe", recipe), expect="error"))
    for model in ("", "missing", "/dev/zero", "\udcff", "."):
        found.append(Input(f"model {shown(model)}", ("rehearse", model, *base[2:]), expect="error"))
    found.append(Input("--bare --memory-only", (*base, "--bare", "--memory-only")))
    found.append(Input("--memory-only, long", ("rehearse", "tiny", "--ranks", "64", "--tokens", "1M", "--memory-only")))
    found.append(Input("more ranks than heads", (*base, "--ranks", "1000")))
    found.append(Input("--hardware missing", (*base, "--hardware", "missing.toml"), expect="error"))
    return numbered("rehearse", found)


def _existing(folder: Path, toys: Toys) -> None:
    toys.copy("run", folder)
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("years of work")
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")


def exports(chance: random.Random) -> list[Input]:
    found = [Input("the pages'", ("export", "run", "out"), _existing, "ok")]
    for name in ("file", "full", "run", "/dev/null", "/proc/x", "loop", "run/config.toml/x", "a" * 300, "file/out"):
        found.append(Input(f"to {shown(name)}", ("export", "run", name), _existing, "error"))
    for name in ("empty", "", "run/model", "run/out", "missing/out", "\udcff", ".", "x/" * 3000, "out/"):
        found.append(Input(f"to {shown(name)}", ("export", "run", name), _existing))
    for dtype in ("float16", "int8", "", "torch.float32", "FLOAT32", "32", "\udcff", "a" * 5000, "object", "uint16"):
        words = ("export", "run", "out", "--dtype", dtype)
        found.append(
            Input(f"--dtype {shown(dtype)}", words, _existing, "either" if dtype in ("", "FLOAT32") else "error")
        )
    for dtype in ("bfloat16", "float32", "float64"):
        found.append(Input(f"--dtype {dtype}", ("export", "run", "out", "--dtype", dtype), _existing, "ok"))
    for run in (
        "missing",
        "file",
        "empty",
        "full",
        "",
        "/dev/null",
        "loop",
        "\udcff",
        "run/checkpoints",
        "run/model",
        "a" * 300,
    ):
        found.append(Input(f"of {shown(run)}", ("export", run, "out"), _existing, "error"))
    return numbered("export", found)


def _data_places(folder: Path, toys: Toys) -> None:
    toys.copy("books", folder)
    toys.copy("good.tokens", folder)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "a.bin").write_bytes(bytes(range(64)))


def data_options(chance: random.Random) -> list[Input]:
    found = [Input("the pages'", ("data", "books", "--out", "out.tokens"), _data_places, "ok")]
    outs = [
        "good.tokens",
        "folder",
        "loop",
        "missing/out.tokens",
        "/dev/full",
        "/dev/null",
        "a" * 300,
        "books/0.txt",
        "/proc/x",
    ]
    found += [Input(f"--out {shown(v)}", ("data", "books", "--out", v), _data_places, "error") for v in outs]
    found += [
        Input(f"--out {shown(v)}", ("data", "books", "--out", v), _data_places) for v in ("", ".", "\udcff.tokens", "x")
    ]
    found.append(Input("no --out", ("data", "books"), _data_places, "error"))
    for dtype in ("uint64", "int32", "", "UINT8", "float32", "\udcff", "u1", "object", "a" * 5000):
        words = ("data", "a.bin", "--out", "out.tokens", "--bin-dtype", dtype)
        found.append(
            Input(f"--bin-dtype {shown(dtype)}", words, _data_places, "either" if dtype == "UINT8" else "error")
        )
    for paths in (
        ("missing",),
        ("books", "missing"),
        ("loop",),
        ("/dev/zero",),
        ("\udcff",),
        ("folder",),
        ("a" * 300,),
    ):
        found.append(
            Input(
                f"of {shown(paths)}",
                ("data", *paths, "--out", "out.tokens"),
                _data_places,
                "error" if paths != ("",) else "either",
            )
        )
    found.append(Input("of /dev/null", ("data", "/dev/null", "--out", "out.tokens"), _data_places, "error"))
    found.append(Input("its own output's folder", ("data", ".", "--out", "out.tokens"), _data_places))
    for more in (
        ("books",),
        ("good.tokens", "good.tokens"),
        ("missing",),
        ("loop",),
        ("folder",),
        ("/dev/null",),
        ("a.bin",),
    ):
        found.append(Input(f"--stats {shown(more)}", ("data", *more, "--stats"), _data_places, "error"))
    found.append(Input("--stats", ("data", "good.tokens", "--stats"), _data_places, "ok"))
    for picture in ("missing/x.png", "/dev/full", "folder", "a" * 300 + ".png"):
        words = ("data", "good.tokens", "--stats", "--picture", picture)
        found.append(Input(f"--picture {shown(picture)}", words, _data_places, "error"))
    both = ("data", "good.tokens", "--stats", "--out", "out.tokens")
    found.append(Input("--stats --out", both, _data_places))
    found.append(
        Input("--picture without --stats", ("data", "books", "--out", "o", "--picture", "x.png"), _data_places)
    )
    for name in ("missing", "books", "good.tokens", "/dev/null", "/dev/zero", "", "loop", "\udcff"):
        words = ("data", "books", "--out", "out.tokens", "--tokenizer", name)
        found.append(Input(f"--tokenizer {shown(name)}", words, _data_places, "error"))
    return numbered("data-option", found)


def started(chance: random.Random) -> list[Input]:
    """A few as programs of their own, with spawned ranks."""
    two = tuple(
        "2" if one == "1" and before == "--ranks" else one for before, one in zip(("", *train()), train(), strict=False)
    )
    found = [
        Input("two ranks", two, SOUND, "ok", started=True),
        Input("two ranks, no model", two, copies("good.tokens"), "error", started=True),
        Input("two ranks, no data", two, copies("model"), "error", started=True),
        Input("two ranks, three Ulysses ranks", (*two, "--set", "mesh.ulysses=3"), SOUND, "error", started=True),
        Input("no arguments but a wrong one", ("train", "--ranks", "x"), nothing, "error", started=True),
    ]
    return numbered("started", found)


MUTATORS = [train_options, train_run_folders, any_command, plan_lengths, plan_gpus, plan_options, rehearsals, exports]
MUTATORS += [data_options, started]
