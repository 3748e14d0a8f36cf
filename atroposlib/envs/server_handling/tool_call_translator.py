"""The original's import path of `atroposlib.inference.tools.translator`."""

from atroposlib.inference.tools.translator import *
