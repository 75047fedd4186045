"""From pictures to patches and placeholders, one file per family."""
