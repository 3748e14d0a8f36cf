"""Drives a `BaseEnv` from outside: serve to a hub, process to a file, evaluate once."""
