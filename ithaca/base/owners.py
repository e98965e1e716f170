"""Who can hold bytes of a GPU: the names that predictions and measurements share."""

STATES, GATHERED, GRADIENTS, KEYS, TAPES = "states", "gathered weights", "gradients", "K and V", "tapes"
ATTENTION, EXCHANGE, LOSS, BLOCKS, BATCH, OTHER = "attention", "exchange", "loss", "blocks", "batch", "other"
KERNELS, ALLOCATOR = "within kernels", "allocator"
HOST = "host"  # seen where the device is a CPU
