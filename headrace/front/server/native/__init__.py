"""Routes of our own: tokenizing, health, what runs and why it waits, administration."""
