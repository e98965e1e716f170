"""Names that options have in other programs, and what to write here instead. Nothing here is accepted as an option.

`{}` in a setting stands for the value that was given. `--run {}` and other flags are those of `ithaca train`.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NEAR = 0.75  # how alike a mistyped name must be, as difflib measures it


@dataclass(frozen=True)
class Alias:
    """The settings to write for a name of another program; without any, only why there is no such option."""

    settings: tuple[str, ...]
    example: str = ""  # the value if none was given, or one that cannot work
    note: str = ""  # how Ithaca counts

    def write(self, value: Any) -> list[str]:
        """Return the settings with the given value, or with the example."""
        text = str(value).strip()
        number = re.compile(r"[\d.]+(e-?\d+)?[KMG]?", re.IGNORECASE)
        usable = isinstance(value, str | int | float) and not isinstance(value, bool)
        usable = usable and (number.fullmatch(text) if number.fullmatch(self.example) else text)
        return [setting.format(text if usable else self.example) for setting in self.settings]


def _table(*rows: tuple[str, Alias]) -> dict[str, Alias]:
    return {name: alias for names, alias in rows for name in names.split()}


RANKS = "counted over all ranks"
ALL_WEIGHTS = "all weights are trained, without LoRA or quantization"

ALIASES = _table(
    ("lr max_lr peak_lr base_lr init_lr learningrate", Alias(("train.learning_rate={}",), "1e-5")),
    ("min_lr lr_min end_lr", Alias(("train.final_rate=0.1",), note="a share of the learning rate")),
    ("scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style", Alias(("train.schedule=cosine",))),
    ("epoch num_epochs num_train_epochs n_epochs max_epochs", Alias(("train.epochs={}",), "1")),
    (
        "max_steps num_steps train_steps training_steps total_steps max_iters train_iters iters iterations",
        Alias(("train.steps={}",), "100"),
    ),
    (
        "bs batch_size global_batch_size train_batch_size gbs batchsize",
        Alias(("train.batch={}",), "8", f"sequences in a step, {RANKS}"),
    ),
    (
        "per_device_train_batch_size per_device_batch_size per_gpu_batch_size local_batch_size micro_batch_size mbs "
        "train_micro_batch_size_per_gpu micro",
        Alias(("train.micro_batch={}",), "1", f"sequences in a pass, {RANKS}"),
    ),
    (
        "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps accumulate_grad_batches ga",
        Alias(
            ("train.batch={}", "train.micro_batch=1"),
            "8",
            f"a step has batch / micro_batch passes, both {RANKS}",
        ),
    ),
    (
        "seq_len seq_length seqlen sequence_len sequence_length max_seq_len max_seq_length max_length max_tokens "
        "context_length context_len context_size context ctx ctx_len n_ctx block_size cutoff_len model_max_length",
        Alias(("train.tokens={}",), "64K"),
    ),
    ("warmup_steps num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters", Alias(("train.warmup={}",), "10")),
    ("warmup_ratio warmup_fraction lr_warmup_fraction", Alias(("train.warmup=10",), note="steps, not a share of them")),
    ("wd", Alias(("train.weight_decay={}",), "0.1")),
    ("adam_beta1", Alias(("train.beta1={}",), "0.9")),
    ("adam_beta2", Alias(("train.beta2={}",), "0.95")),
    ("betas adam_betas", Alias(("train.beta1=0.9", "train.beta2=0.95"))),
    (
        "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clip gradient_clip_val gradient_clipping max_norm",
        Alias(("train.clip={}",), "1.0"),
    ),
    ("random_seed manual_seed data_seed", Alias(("train.seed={}",), "0")),
    ("use_cpu no_cuda cpu", Alias(("train.device=cpu",))),
    ("accelerator", Alias(("train.device=auto",))),
    (
        "optim optimizer optimizer_type optimizer_name",
        Alias((), note="AdamW is the optimizer, and plan.optimizer says where its moments live"),
    ),
    (
        "save_steps save_every save_interval save_freq save_strategy checkpoint_interval checkpoint_freq ckpt_interval",
        Alias(("run.checkpoint_every={}",), "50"),
    ),
    ("save_total_limit keep_last max_to_keep keep_checkpoints", Alias(("run.keep={}",), "2")),
    ("log_interval logging_steps log_freq log_every_n_steps log_steps", Alias(("run.log_every={}",), "10")),
    (
        "eval_steps eval_interval eval_every eval_freq eval_strategy evaluation_strategy val_interval "
        "val_check_interval validation_interval validate_interval",
        Alias(("run.validate_every={}",), "100"),
    ),
    ("patience ddp_timeout", Alias(("run.timeout={}",), "1200")),
    ("report_to logger loggers tensorboard use_tensorboard", Alias(("run.report=tensorboard",))),
    ("wandb use_wandb wandb_project", Alias(("run.report=wandb",))),
    (
        "output_dir output out_dir save_dir run_dir ckpt_dir checkpoint_dir logdir logging_dir",
        Alias(("--run {}",), "runs/mine"),
    ),
    (
        "resume resume_from resume_from_checkpoint load_checkpoint",
        Alias(("--run {}",), "runs/mine", "a run continues when its folder is named"),
    ),
    ("init_from load_weights load_from pretrained_checkpoint", Alias(("--from {}",), "runs/other")),
    ("overwrite_output_dir overwrite", Alias(("--fresh",))),
    (
        "gpus num_gpus n_gpus ngpus nproc nproc_per_node num_processes world_size devices",
        Alias(("--ranks {}",), "8"),
    ),
    (
        "model model_name model_path model_id model_name_or_path base_model pretrained pretrained_model hf_model",
        Alias(("model.source={}",), "my-model", "a Hugging Face folder or a preset"),
    ),
    (
        "data dataset datasets dataset_name dataset_path data_path data_dir train_file train_files train_data "
        "train_dataset data_files corpus",
        Alias(("data.source={}",), "books.tokens", "a token file that `ithaca data` makes"),
    ),
    ("val_set_size validation_split test_size eval_size", Alias(("data.validation={}",), "0.05")),
    (
        "val_data val_dataset val_file eval_data eval_dataset eval_file validation_file validation_data",
        Alias(("data.validation={}",), "held-out.tokens", "a token file, or a share of the documents, as 0.05"),
    ),
    ("pack sample_packing pack_sequences", Alias(("data.packing=auto",))),
    (
        "tokenizer tokenizer_name tokenizer_path",
        Alias((), note="`ithaca data --tokenizer` makes the token file with it"),
    ),
    ("bf16 amp mixed_precision precision torch_dtype autocast", Alias(("model.dtype=bfloat16",))),
    ("fp16 half", Alias(("model.dtype=bfloat16",), note="fp16 is not supported")),
    ("fp32 tf32", Alias(("model.dtype=float32",))),
    ("rope_theta rope_scaling rope_type rope_freq_base", Alias(("model.rope=auto",))),
    (
        "fsdp fsdp_config zero_stage zero deepspeed sharding_strategy fully_shard",
        Alias(("plan.zero=3",), note="FSDP2 is always used"),
    ),
    (
        "gradient_checkpointing use_gradient_checkpointing activation_checkpointing activation_checkpoint recompute "
        "activation_offload activation_offloading",
        Alias(("plan.recipe=auto",), note="the planner decides what is saved, and where"),
    ),
    (
        "attn attn_implementation flash_attn flash_attention use_flash_attention_2 use_flash_attn attention",
        Alias(("plan.recipe=auto",), note="the fastest attention kernel is taken by itself"),
    ),
    ("cpu_offload offload_optimizer optimizer_offload", Alias(("plan.optimizer=host",))),
    ("chunk_size", Alias(("plan.chunk={}",), "64K")),
    (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree sp sp_size sequence_parallel "
        "sequence_parallel_size sequence_parallel_degree ulysses_size ulysses_degree ulysses_sequence_parallel_size",
        Alias(("mesh.ulysses={}",), "8"),
    ),
    ("ring_size ring_degree ring_attn ring_attention", Alias(("mesh.ring={}",), "2")),
    ("dp dp_size dp_shard data_parallel_size data_parallel_shard_degree", Alias(("mesh.shard={}",), "8")),
    ("dp_replicate data_parallel_replicate_degree hsdp", Alias(("mesh.replicate={}",), "2")),
    (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
        Alias(("mesh.tensor={}", "plan.recipe=tensor"), "8"),
    ),
    (
        "pp pp_size pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
        Alias(("mesh.ulysses={}",), "8", "ranks share a sequence; there is no pipeline parallelism"),
    ),
    (
        "lora use_lora lora_r lora_rank lora_alpha lora_dropout peft adapter qlora load_in_4bit load_in_8bit "
        "quantization",
        Alias((), note=ALL_WEIGHTS),
    ),
    ("compile torch_compile use_compile", Alias((), note="leave it out, the kernels are compiled already")),
    ("num_workers dataloader_num_workers num_proc", Alias((), note="leave it out, a thread reads the data")),
    ("trust_remote_code", Alias((), note="leave it out, a model folder never runs code")),
)


def suggest_option(
    name: str,
    value: Any,
    options: Mapping[str, Any],
    show: Callable[[str], str] = lambda setting: setting,
    mistyped: bool = True,
) -> str | None:
    """Return what to write for an unknown name, as the end of a sentence; None if nothing is like it.

    `options`: the default of every option, by names as 'train.steps'. The unknown name may be known elsewhere, or an
    option without its table, or mistyped (unless not `mistyped`). `show`: how a setting is shown.
    """
    word, tables = name.lstrip("-").lower().replace("-", "_"), dict[str, list[str]]()
    if alias := ALIASES.get(word):
        text = " with ".join(map(show, alias.write(value)))
        return f"write {text}{f' ({alias.note})' * bool(alias.note)}" if text else alias.note
    for option in options:
        tables.setdefault(option.partition(".")[2], []).append(option)
    if found := [word] if word in options else tables.get(word):
        return "write " + " or ".join(show(f"{option}={_shown(value, options[option])}") for option in found)
    near = difflib.get_close_matches(word, [*tables, *ALIASES], n=1, cutoff=NEAR) if mistyped else None
    return suggest_option(near[0], value, options, show) if near else None


def _shown(value: Any, default: Any) -> str:
    """Return a value as TOML has it; the option's default if none was given."""
    value = default if value in (None, "") or isinstance(value, dict | list) else value
    return str(value).lower() if isinstance(value, bool) else "…" if value in (None, "") else str(value)
