"""Packed weights: how they are stored, computed with, quantised, and streamed."""
