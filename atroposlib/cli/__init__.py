"""Commands; each starts the other parts as processes and never imports them."""
