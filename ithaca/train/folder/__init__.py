"""The run folder, what checkpoints record in it, and its export."""
