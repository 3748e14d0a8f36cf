"""The original's import paths of the inference layer, which is `atroposlib.inference`."""
