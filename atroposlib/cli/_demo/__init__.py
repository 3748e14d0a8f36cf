"""Parts of `atropos-demo`; nothing else imports them."""
