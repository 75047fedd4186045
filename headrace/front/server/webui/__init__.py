"""The page at `/`: a playground and a live view of the engine. Plain files, no toolchain, nothing
from elsewhere."""
