"""The hub over HTTP: the table of routes, rights, limits, bodies and metrics."""
