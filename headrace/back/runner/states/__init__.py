"""What differs between kinds of models, behind one protocol (state.py): the runner holds no `if` about them."""
