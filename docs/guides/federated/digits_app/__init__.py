"""Four nodes with private handwritten digits, and a server that queries labels for public ones."""
