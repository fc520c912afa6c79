"""Four nodes with handwritten digits, a server that asks for the labels of public ones."""
