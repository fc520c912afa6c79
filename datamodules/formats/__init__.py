"""File formats, image stores and loaders behind the data modules."""
