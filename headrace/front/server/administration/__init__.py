"""What an operator may do, and the routes that do it."""
