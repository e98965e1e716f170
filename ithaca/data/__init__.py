"""Token files: made from text or tokens (`prepare`), read as training sequences (`sample`, which loads torch)."""
