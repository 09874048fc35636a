"""The HTTP service: classifiers that learn while they serve, and the page to watch them."""
