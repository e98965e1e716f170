"""GPU tables for `--hardware`; what one has is said in docs/planning.md."""

import random

from tests.fuzz.recipe import Expected, Input, all_of, copies, numbered, shown, writes

SEVEN = ["memory", "flops", "bandwidth", "inside", "across", "host", "ram"]
SOUND = {"memory": "96e9", "flops": "400e12", "bandwidth": "3e12", "inside": "100e9", "across": "25e9", "host": "25e9"}
SOUND |= {"ram": "128e9"}
WRONG = [
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    '"96GB"',
    "true",
    "[]",
    "{}",
    '["x", "y"]',
    "[1]",
    "[1, 2]",
    "[1, 2, 3]",
    '["", 1]',
]
WRONG += [
    "[nan, 'x']",
    "[-1, 'x']",
    "[0, 'x']",
    "[true, 'x']",
    "[inf, 'x']",
    "[[1], 'x']",
    "1979-05-27",
    "[{}, 'x']",
    "[1e400, 'x']",
]
EDGE = ["[1e-300, 'x']", "[1e300, 'x']", "[1, '']", "[1, 'x']", "1e12", "[1e12, '\\u0000']"]


def table(name: str = "MyGPU-96GB", **other: str) -> str:
    told = {key: f'[{value}, "its data sheet"]' for key, value in SOUND.items()} | other
    return f'["{name}"]\n' + "".join(f"{key} = {value}\n" for key, value in told.items())


def words(chance: random.Random, gpus: str = "8xMyGPU-96GB") -> tuple[str, ...]:
    more = chance.choice([(), ("--json",), ("--meshes",), ("--tokens", "64K"), ("--verbose", "--disk", "1TB")])
    return ("plan", "tiny", "--gpus", gpus, "--hardware", "gpus.toml", *more)


def values(chance: random.Random) -> list[Input]:
    """Every number of a GPU, wrong."""
    found = [Input("sound", words(chance), writes("gpus.toml", table()), "ok")]
    for key in SEVEN:
        for value in WRONG:
            text = table(**{key: value})
            found.append(Input(f"{key} = {value}", words(chance), writes("gpus.toml", text), "error"))
        for value in EDGE:
            text = table(**{key: value})
            found.append(Input(f"{key} = {value}", words(chance), writes("gpus.toml", text)))
        text = "".join(line + "\n" for line in table().splitlines() if not line.startswith(f"{key} ="))
        found.append(Input(f"no {key}", words(chance), writes("gpus.toml", text), "error"))
    return numbered("gpu-value", found)


def files(chance: random.Random) -> list[Input]:
    """Files that are no tables of GPUs."""
    bad = {
        "no TOML": b"{",
        "binary": bytes(range(256)),
        "UTF-16": table().encode("utf-16"),
        "values outside a table": b"memory = 3\n",
        "a list of tables": b'[["MyGPU-96GB"]]\nmemory = 3\n',
        "a number for a GPU": b'"MyGPU-96GB" = 3\n',
        "an unknown key": table(colour='"blue"').encode(),
        "a table for a number": table(memory="{bytes = 3}").encode(),
        "a deep list": b'["MyGPU-96GB"]\nmemory = ' + b"[" * 20000 + b"]" * 20000,
        "two of a name": (table() + table()).encode(),
    }
    found = [Input(name, words(chance), writes("gpus.toml", data), "error") for name, data in bad.items()]
    for name in ("", " ", "a b", "8xH100", "x", "\\u0000", "a" * 300, "H100-80GB", "MyGPU", "🜚"):
        text = table(name)
        found.append(Input(f"a GPU called {shown(name)}", words(chance, f"8x{name}"), writes("gpus.toml", text)))
    found.append(Input("no bytes", ("plan", "tiny", "--hardware", "gpus.toml"), writes("gpus.toml", b"")))
    changed = b'["H100-80GB"]\nhost = [22e9, "measured"]\n'
    found.append(
        Input("the page's change", ("plan", "tiny", "--hardware", "gpus.toml"), writes("gpus.toml", changed), "ok")
    )
    for key in ("attention", "gemm", "kernel", "capability", "sm", "source"):
        for value in ("3", '"x"', "[]", "{}", '[1, "x"]'):
            expect: Expected = "either"
            text = table(**{key: value})
            found.append(Input(f"{key} = {value}", words(chance), writes("gpus.toml", text), expect))
    for path in ("missing.toml", ".", "/dev/null", "/dev/zero", "\udcff", "a" * 300, ""):
        expect = "either" if path in ("/dev/null", "") else "error"
        found.append(Input(f"--hardware {shown(path)}", ("plan", "tiny", "--hardware", path), expect=expect))
    rehearse = ("rehearse", "tiny", "--tokens", "256", "--ranks", "2", "--hardware", "gpus.toml")
    for name in ("no TOML", "binary", "a number for a GPU"):
        found.append(
            Input(f"{name} (rehearse)", rehearse, all_of(copies("model"), writes("gpus.toml", bad[name])), "error")
        )
    return numbered("gpu-file", found)


MUTATORS = [values, files]
