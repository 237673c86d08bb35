"""The command line: typer commands, thin."""
