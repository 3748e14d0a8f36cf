"""Print the tests that failed in pytest's last run, one per line; exit 1 if none or more than `--at-most` failed."""

import argparse
import json
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--at-most", type=int, required=True)
limit = parser.parse_args().at_most
cache = Path(".pytest_cache/v/cache/lastfailed")
failed = sorted(json.loads(cache.read_text())) if cache.exists() else []
sys.stdout.write("".join(f"{name}\n" for name in failed))
if not 0 < len(failed) <= limit:
    sys.exit(f"{len(failed)} tests failed; between 1 and {limit} would be run again")
