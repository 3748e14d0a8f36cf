"""What the tests of other projects import from here."""
