"""Observability: metric definitions, their exporter, the start report and the stats log."""
