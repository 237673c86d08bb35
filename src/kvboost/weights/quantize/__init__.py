"""`kvboost quantize`: plain weights to AWQ checkpoints, by activation-aware scaling or by rounding alone."""
