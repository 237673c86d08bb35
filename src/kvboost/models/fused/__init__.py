"""Faster forms of common Transformers modules, used inside engine steps only, each proved equal at load or left out."""
