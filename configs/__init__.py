"""Typed settings, their YAML files, the demo checkpoint and its data."""
