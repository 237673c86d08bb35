"""Workloads, engines side by side, tables and plots."""
