"""Small pieces for authors of environments and trainers."""
