"""What tests of several folders build: written once, and named after what it makes."""
