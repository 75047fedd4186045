"""Files and batches: uploads kept on disk, and requests out of a file answered one after the other
into another."""
