"""Images: finding them, reading them, making views."""
