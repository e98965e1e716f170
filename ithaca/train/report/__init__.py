"""What a run says: lines on the terminal, metrics, warnings, its last words and pictures."""
