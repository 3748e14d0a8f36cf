"""The original's import path of `atroposlib.inference.manager`."""

from atroposlib.inference.manager import *
