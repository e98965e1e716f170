"""Text and tokens into one token file, and sequences out of it. Only `sample` loads torch."""
