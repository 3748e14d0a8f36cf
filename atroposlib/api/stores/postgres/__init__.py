"""Runs in PostgreSQL, so that a run survives its host: schema, ownership, and one store per run. Extra `postgres`."""

__all__ = ["owners", "rows", "runs", "schema", "store"]
