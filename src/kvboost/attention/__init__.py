"""Functions registered with the AttentionInterface of Transformers."""
