"""How the bundled demo model is made; see README.md."""
