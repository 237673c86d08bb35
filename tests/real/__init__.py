"""A package, so that its test files may be named as those in `unit`."""
