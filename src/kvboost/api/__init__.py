"""What people hold: KVBoost, LLM, boost() and results."""
