"""One-line privacy faults, and the tool that puts each into a copy of the package to see whether a test notices."""
