"""The commands of the seed documents (the five generations of this system's documentation), run as they are written."""
