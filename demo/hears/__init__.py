"""The demo model that hears: what is said to it, and how it is trained."""
