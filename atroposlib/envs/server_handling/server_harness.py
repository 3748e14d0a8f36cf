"""The original's import path of `atroposlib.inference.harness`."""

from atroposlib.inference.harness import *
