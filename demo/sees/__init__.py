"""The demo model that sees: what it is shown and asked, and how it is trained."""
