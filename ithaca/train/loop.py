"""The training loop: sequences in, weights changed, one line of progress."""

import math

import torch

from ithaca.assemble import Model, apply
from ithaca.config import Config, TrainSection
from ithaca.errors import ConfigError
from ithaca.model.source import load_model
from ithaca.parallel.mesh import mesh
from ithaca.parallel.sharding import local
from ithaca.train.data import standard_library
from ithaca.train.progress import Progress


def train(config: Config) -> list[float]:
    """Train on this job's ranks and give back the loss of each step. Every rank calls it."""
    options = config.train
    grid = mesh(**vars(config.mesh))
    source = load_model(config.model.source, config.model.dtype, config.model.seed)
    data = standard_library()
    if source.spec.vocab < 256:
        raise ConfigError(f"the data are bytes, 256 tokens, but the model's vocabulary is {source.spec.vocab}")
    model = apply(source, config.plan, grid)
    optimizer = make_optimizer(model, options)
    losses = []
    with Progress(model, options) as progress:
        for step in range(options.steps):
            tokens, documents = data.sequences(options.batch, options.tokens, options.seed, step)
            batch = model.shard(tokens, tokens, documents)
            loss = model(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.step(step, losses[-1], batch)
    return losses


def make_optimizer(model: Model, options: TrainSection) -> torch.optim.Optimizer:
    """AdamW on this rank's shards; norms and biases do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A rank without rows of a weight has nothing to update, and the fused kernel refuses empty shards
    fused = all(local(parameter).numel() for parameter in model.parameters())
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)


def learning_rate(options: TrainSection, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
