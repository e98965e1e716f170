"""AdamW on shards, and the learning rate over a run."""

import math

import torch
from torch.distributed.tensor import DTensor

from ithaca.assemble import Model
from ithaca.config import TrainSection


def make_optimizer(model: Model, options: TrainSection) -> torch.optim.AdamW:
    """Fused AdamW on this rank's shards; norms and biases do not decay. Its states exist from the start, as zeros."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in learned if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in learned if p.dim() == 1], "weight_decay": 0.0},
    ]
    rate, betas = options.learning_rate, (options.beta1, options.beta2)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=betas, fused=True)
    for parameter in learned:
        # As AdamW would make them in its first step: a checkpoint can then be read into them at any time
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def clip(model: Model, largest: float) -> float:
    """Shrink the gradients to a norm of at most `largest`, over all ranks; gives the norm they had."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def learning_rate(options: TrainSection, step: int) -> float:
    """Linear warm-up; then `cosine` falls at once, `wsd` stays and falls linearly over the last part of the run."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - 1 - options.warmup, 1)  # 1 in the last step
    if options.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    else:
        share = min((1 - done) / options.decay, 1.0) if options.decay else 1.0
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * share)
