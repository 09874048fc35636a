"""Images: found, read, and made into views."""
