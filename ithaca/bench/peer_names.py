"""The sides of `ithaca bench peers`: their names, and the packages that each needs. No torch."""

PLAIN = "transformers + checkpointing"
LIGER = "+ Liger"
LIGER_ALONE = "transformers + Liger, nothing checkpointed"
TILED = "+ Liger, tiled MLP, host offload"
WITH_ALST = "DeepSpeed ALST pieces"
ITHACA_SWEEP = "Ithaca, sweep"
ITHACA_PLANNED = "Ithaca, planned"

PACKAGES: dict[str, tuple[str, ...]] = {
    PLAIN: ("transformers",),
    LIGER: ("transformers", "liger_kernel"),
    LIGER_ALONE: ("transformers", "liger_kernel"),
    TILED: ("transformers", "liger_kernel"),
    WITH_ALST: ("transformers", "deepspeed"),
    ITHACA_SWEEP: (),
    ITHACA_PLANNED: (),
}
INSTALL = {
    "transformers": "pip install transformers",
    "liger_kernel": "pip install liger-kernel",
    "deepspeed": "pip install deepspeed",
}
BEST = "best"  # the attention of a side: the fastest that it accepts
