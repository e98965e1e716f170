"""Configuration: what is read, and the sentence for what cannot be."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ithaca.base.errors import ConfigError, IthacaError
from ithaca.base.sizes import format_bytes, format_count, format_seconds, format_tokens, parse_bytes, parse_tokens
from ithaca.config import parse_config, read_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.train.setup.configuration import tell_once

SMALL, LLAMA = (read_spec(PRESETS[name]) for name in ("smollm2-135m", "llama3-8b"))


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nsource = "llama3-8b"\n[train]\ntokens = "64K"\nsteps = 7\n[plan]\ncheckpoint = "none"\n')
    config = read_config(file, ["train.steps=9", "model.dtype=bfloat16", "mesh.shard=4", "train.clip=2"])
    assert (config.model.source, config.train.tokens, config.plan.checkpoint) == ("llama3-8b", 65536, "none")
    assert (config.train.steps, config.model.dtype, config.mesh.shard) == (9, "bfloat16", 4)
    assert config.train.clip == 2.0
    assert config.train.batch == read_config(None, []).train.batch


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.step=3", "'train.step' is not an option: did you mean 'steps'"),
        ("trian.steps=3", "'trian' is not an option: did you mean 'train'"),
        ("plan.zzz=3", "'plan.zzz' is not an option: known are recipe, checkpoint"),
        ("train.steps=many", "train.steps 'many' is not a whole number"),
        ("train.steps=2.5", "train.steps 2.5 is not a whole number"),
        ("train.steps=true", "train.steps true is not a whole number"),
        ("mesh.shard=x", "mesh.shard 'x' is not a whole number"),
        ("train.steps=0", "train.steps is 0: 1 or more"),
        ("train.learning_rate=-1", "train.learning_rate is -1.0: a number above 0"),
        ("train.learning_rate=nan", "train.learning_rate is nan"),
        ("train.tokens=12Q", "'12Q' is not a number of tokens: write 4096, 64K or 5M"),
        ("train.tokens=1", "train.tokens is 1: 2 or more"),
        ("train=3", "'train' is a table of options, not 3"),
        ("train.steps.x=3", "goes through|is not a whole number"),
        ("steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("plan.recipe=wsweep", "recipe 'wsweep' does not exist: did you mean 'sweep'"),
        ("plan.checkpoint=ful", "did you mean 'full'"),
        ("plan.zero=4", "zero must be 1, 2 or 3; it is 4"),
        ("plan.optimizer=hots", "optimizer=hots does not exist: did you mean 'host'"),
        ("plan.loss_tile=0", "plan.loss_tile: '0' is not a number of tokens"),
        ("run.timeout=0", "run.timeout is 0: seconds above 0 and up to 2592000 are needed, as 1200"),
        ("run.timeout=-3", "run.timeout is -3: seconds above 0"),
        ("run.timeout=nan", "run.timeout is nan: seconds above 0"),
        ("run.timeout=1e9", "run.timeout is 1e[+]09: seconds above 0 and up to 2592000"),
        ("run.timeout=long", "run.timeout 'long' is not a number of seconds, e.g. 600"),
    ],
)
def test_refused(override: str, sentence: str) -> None:
    with pytest.raises(IthacaError, match=sentence):
        read_config(None, [override])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(IthacaError, match="cannot be read"):
        read_config(tmp_path / "missing.toml", [])
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(IthacaError, match="is not TOML"):
        read_config(tmp_path / "bad.toml", [])
    (tmp_path / "deep.toml").write_text("a = " + 5000 * "[" + 5000 * "]")
    with pytest.raises(IthacaError, match="is not TOML"):
        read_config(tmp_path / "deep.toml", [])


def test_another_recipe_leaves_out_what_it_has_no_use_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[plan]\nrecipe = "sweep"\nchunk = "32K"\ntile = "4K"\n')
    assert read_config(file, []).plan == Plan(recipe="sweep", chunk=32768, tile=4096)
    assert read_config(file, ["plan.recipe=alst"]).plan == Plan(recipe="alst", tile=4096)
    assert "Ignoring plan.chunk=32K: recipe 'alst' has no such option" in capsys.readouterr().err
    lists = tmp_path / "lists.toml"
    lists.write_text('[plan]\nrecipe = "sweep"\nx = "host, rebuild*7"\n')
    assert read_config(lists, []).plan.placement(8).x == ("host",) + 7 * ("rebuild",)
    assert read_config(lists, ["plan.x=device, host*2"]).plan.x == "device, host*2"
    assert read_config(lists, ["plan.recipe=alst"]).plan == Plan(recipe="alst")
    assert "Ignoring plan.x=host, rebuild*7: recipe 'alst' cannot rebuild x" in capsys.readouterr().err
    disk = tmp_path / "disk.toml"
    disk.write_text('[plan]\nrecipe = "sweep"\no = "disk"\ndisk = "/scratch"\n')
    assert read_config(disk, ["plan.recipe=alst"]).plan == Plan(recipe="alst")
    assert "Ignoring plan.disk=/scratch: recipe 'alst' writes nothing to disk" in capsys.readouterr().err
    with pytest.raises(IthacaError, match="checkpoint=full has no effect under recipe 'sweep'"):
        read_config(file, ["plan.checkpoint=full"])
    with pytest.raises(IthacaError, match="chunk=8K has no effect under recipe 'dense'"):
        read_config(file, ["plan.recipe=dense", "plan.chunk=8K"])
    capsys.readouterr()
    file.write_text('[plan]\ncheckpoint = "selective"\n')  # of `dense`, which was not said
    assert read_config(file, ["plan.recipe=dense"]).plan.checkpoint == "selective"
    assert capsys.readouterr().err == ""
    assert read_config(file, []).plan == Plan(checkpoint="selective")
    assert capsys.readouterr().err == "plan.recipe is not set: using 'dense' with the plan options that are\n"


def test_a_plan_that_is_left_open(tmp_path: Path) -> None:
    file = tmp_path / "auto.toml"
    file.write_text('[plan]\nrecipe = "auto"\n[train]\nsteps = 3\n')
    assert read_config(None, []).plan is None
    assert read_config(None, ["plan.recipe=auto"]).plan is None
    assert read_config(file, []).plan is None
    assert read_config(file, ["plan.recipe=sweep", "plan.chunk=8K"]).plan == Plan(recipe="sweep", chunk=8192)
    assert read_config(None, ["plan.zero=2"]).plan == Plan(zero=2)
    # Whoever names an option names a Plan
    for overrides in (["plan.recipe=auto", "plan.chunk=8K"], ["plan.chunk=8K", "plan.recipe=auto"]):
        with pytest.raises(
            IthacaError,
            match=r"^plan.chunk=8K needs a recipe, but plan.recipe='auto' lets the planner choose: leave",
        ):
            read_config(None, overrides)
    with pytest.raises(IthacaError, match=r"plan.zero=2 needs a recipe"):
        read_config(file, ["plan.zero=2"])
    with pytest.raises(IthacaError, match="recipe 'autp' does not exist"):
        read_config(None, ["plan.recipe=autp"])
    for wrong in ("plan=auto", "plan=3"):
        with pytest.raises(IthacaError, match="'plan' is a table of options, not"):
            read_config(None, [wrong])


def test_a_plan_of_the_file_is_left_open_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[plan]\nrecipe = "sweep"\nchunk = "32K"\nzero = 2\n')
    assert read_config(file, ["plan.recipe=auto"]).plan is None
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "Ignoring plan.chunk=32K: the planner chooses the Plan",
        "Ignoring plan.zero=2: the planner chooses the Plan",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["plan.recipe=auto", "mesh.ulysses=2"],
        ["plan.recipe=sweep", "plan.chunk=8K", "plan.x=host, rebuild*7", "plan.host_memory=64GB"],
        ["plan.recipe=untied", "plan.optimizer=host", "train.tokens=1M"],
        ["plan.o=disk", "plan.recipe=sweep", "plan.disk=/a b/c"],
    ],
)
def test_a_configuration_comes_back_from_its_file(tmp_path: Path, overrides: list[str]) -> None:
    config = read_config(None, overrides)
    file = tmp_path / "config.toml"
    file.write_text(config.toml())
    assert read_config(file, []) == config
    assert ("[plan]" in config.toml()) == (config.plan is not None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_settled_plan_says_everything_and_comes_back(recipe: str) -> None:
    plan = Plan(recipe=recipe).settled()
    assert plan.settled() == plan
    assert all(getattr(plan, name) == value for name, value in RECIPES[recipe].options.items())
    settled = Plan(recipe=recipe).settled_for(SMALL)
    assert settled.settled_for(LLAMA) == settled  # also the tile is a number now
    assert replace(settled, tile=None) == plan
    assert (settled.tile is not None) == RECIPES[recipe].tiled


@pytest.mark.parametrize(
    ("preset", "tile"),
    [
        ("llama3-8b", 8192),
        ("qwen3-32b", 8192),  # 4551 would fill the same memory
        ("llama3.2-1b", 14 * 1024),  # 14603
        ("smollm2-135m", 64 * 1024),  # 73115, but a chunk has no more
    ],
)
def test_a_tile_takes_the_memory_of_one_of_llama3_8b(preset: str, tile: int) -> None:
    spec = read_spec(PRESETS[preset])
    for recipe in ("alst", "untied", "sweep"):
        assert Plan(recipe=recipe).settled_for(spec).tile == tile
        assert Plan(recipe=recipe, tile=8192).settled_for(spec).tile == 8192
    assert Plan(recipe="sweep", chunk=100).settled_for(spec).tile == 100
    assert Plan(recipe="alst", checkpoint="none", x="device").settled_for(spec).tile is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_optimizer_states_have_a_place_under_every_recipe(recipe: str) -> None:
    assert read_config(None, [f"plan.recipe={recipe}"]).plan.settled().optimizer == "device"
    assert read_config(None, [f"plan.recipe={recipe}", "plan.optimizer=host"]).plan.settled().optimizer == "host"
    with pytest.raises(IthacaError, match="optimizer=None does not exist: known are device, host"):
        Plan(recipe=recipe, optimizer=None)  # pyrefly: ignore


OLD = '[train]\nmicro = 1\n[run]\npatience = 900.0\n[plan]\nrecipe = "sweep"\ngradient = "device"\n'
NOTICE = (
    "Renamed: train.micro is now train.micro_batch, run.patience is now run.timeout, plan.gradient is now "
    "plan.residual. The old names still work.\n"
)


def test_old_names_work_with_one_notice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "old.toml"
    file.write_text(OLD)
    for source, overrides in (
        (file, []),
        (None, ["train.micro=1", "run.patience = 900", "plan.recipe=sweep", "plan.gradient=device"]),
        (None, ['plan={recipe="sweep", gradient="device"}', "train={micro=1}", "run={patience=900}"]),
    ):
        config = read_config(source, overrides)
        assert capsys.readouterr().err == NOTICE
        assert (config.train.micro_batch, config.run.timeout, config.plan.residual) == (1, 900.0, "device")
        for old in ("micro =", "patience", "gradient"):
            assert old not in config.toml()
    read_config(file, [], saved=True)
    assert capsys.readouterr().err == ""
    read_config(None, ["train.micro=1"])
    assert capsys.readouterr().err == ("Renamed: train.micro is now train.micro_batch. The old names still work.\n")


def test_an_override_wins_over_the_old_name_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(OLD)
    assert read_config(file, ["train.micro_batch=2", "train.batch=4"]).train.micro_batch == 2
    file.write_text("[train]\nmicro_batch = 1\n")
    assert read_config(file, ["train.micro=2", "train.batch=4"]).train.micro_batch == 2


def test_both_names_are_one_error(tmp_path: Path) -> None:
    wanted = "train.micro=1 and train.micro_batch=2 are one option, which was renamed: keep train.micro_batch"
    file = tmp_path / "both.toml"
    file.write_text("[train]\nmicro = 1\nmicro_batch = 2\n")
    with pytest.raises(IthacaError, match=wanted):
        read_config(file, [])
    for overrides in (["train.micro=1", "train.micro_batch=2"], ["train.micro_batch=2", "train.micro=1"]):
        with pytest.raises(IthacaError, match=wanted):
            read_config(None, overrides)


def test_the_old_name_in_python() -> None:
    with pytest.warns(UserWarning, match=r"Plan\(gradient=…\) is now Plan\(residual=…\)"):
        plan = Plan(recipe="sweep", gradient="device")
    assert plan == Plan(recipe="sweep", residual="device")
    with pytest.raises(IthacaError, match="gradient=host and residual=device are one option, which was renamed: keep"):
        Plan(recipe="sweep", residual="device", gradient="host")


def test_sizes() -> None:
    assert [parse_bytes(text) for text in (4096, "80GB", "1.9TB", "64GiB")] == [4096, 80 * 10**9, 19 * 10**11, 2**36]
    assert [parse_tokens(text) for text in (4096, "64K", "1.5M", "5m")] == [4096, 65536, 1572864, 5 * 2**20]
    assert [format_tokens(n) for n in (1000, 4096, 5 * 2**20, 2**20 + 1024)] == ["1000", "4K", "5M", "1025K"]
    assert [format_count(n, "sequence") for n in (0, 1, 4, 1234)] == [
        "0 sequences",
        "1 sequence",
        "4 sequences",
        "1,234 sequences",
    ]
    assert [format_count(n, "pass") for n in (1, 2)] == ["1 pass", "2 passes"]
    assert [format_bytes(n) for n in (512, 1536, 15 * 2**30)] == ["512 B", "1.5 KiB", "15 GiB"]
    assert [format_bytes(n) for n in (1000, 1010 * 2**20, 2**60)] == ["1000 B", "1010 MiB", "1048576 TiB"]
    assert [format_seconds(n) for n in (0.0012, 47 * 3600, 999 * 3600)] == ["0.0012 s", "47 h", "41.6 days"]
    assert [format_seconds(n) for n in (2, 90, 600, 1431, 12600)] == ["2 s", "90 s", "10 min", "23.9 min", "3.5 h"]


@pytest.mark.parametrize(
    ("environ", "told"), [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0), ({"SLURM_PROCID": "3"}, 0)]
)
def test_one_rank_tells_of_old_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, environ: dict[str, str], told: int
) -> None:
    """Under torchrun and srun every rank reads the configuration."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    read_config(None, ["train.micro=1"], tell_once)
    assert capsys.readouterr().err.count("train.micro is now train.micro_batch") == told


def test_a_table_on_the_command_line_sets_its_options_only(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 7\nseed = 3\n")
    train = read_config(file, ["train={steps=9, batch=2}"]).train
    assert (train.steps, train.seed, train.batch) == (9, 3, 2)
    with pytest.raises(ConfigError, match=r"--set train=\{\} is a table without options"):
        read_config(file, ["train={}"])


def test_a_number_of_too_many_digits() -> None:
    with pytest.raises(ConfigError, match=r"run.timeout '9+\.\.\.9+' is not a number of seconds, e.g. 600"):
        read_config(None, ["run.timeout=" + 5000 * "9"])


def test_only_small_regular_files_are_configurations(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is not TOML \(it is a device or a pipe, not a file\)"):
            read_config(path, [])
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match=r"is not TOML \(it has 1048577 bytes, and 1048576 are the most\)"):
        read_config(tmp_path / "large", [])


def test_only_ascii_digits_are_numbers() -> None:
    with pytest.raises(ConfigError, match=r"plan\.chunk"):
        read_config(None, ["plan.recipe=sweep", "plan.chunk=٣"])


@pytest.mark.parametrize(
    "given",
    [
        ["data.mix.books.tokens=0.7", "data.mix.a/b c.tokens=2"],
        ['data.mix."books.tokens"=0.7', "data.mix.'a/b c.tokens'=2"],
        ['data.mix={"books.tokens"=0.7, "a/b c.tokens"=2}'],
        ['data={mix={"books.tokens"=0.7, "a/b c.tokens"=2}}'],
    ],
)
def test_spellings_of_a_mixture(given: list[str], tmp_path: Path) -> None:
    config = read_config(None, given)
    assert config.data.mix == {"books.tokens": 0.7, "a/b c.tokens": 2.0}
    (tmp_path / "a.toml").write_text(config.toml())
    assert read_config(tmp_path / "a.toml", []) == config


def test_a_mixture_in_a_file(tmp_path: Path) -> None:
    """Dots of a name need no quotes in TOML, and one weight can be changed."""
    file = tmp_path / "a.toml"
    file.write_text('[data.mix]\nbooks.tokens = 1\n"x=\\u007f.tokens" = 3\n')
    assert read_config(file, []).data.mix == {"books.tokens": 1.0, "x=\x7f.tokens": 3.0}
    config = read_config(file, ["data.mix.books.tokens=4", "data.mix.y=z.tokens=5"])
    assert config.data.mix == {"books.tokens": 4.0, "x=\x7f.tokens": 3.0, "y=z.tokens": 5.0}
    file.write_text(config.toml())
    assert read_config(file, []) == config


def test_a_saved_configuration_without_a_packing_cuts(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[train]\nsteps = 3\n")
    assert read_config(file, [], saved=True).data.packing == "cut"
    assert parse_config(file.read_text()).data.packing == "cut"
    assert read_config(file, []).data.packing == "auto"
    assert read_config(file, ["data.packing=joined"], saved=True).data.packing == "joined"
