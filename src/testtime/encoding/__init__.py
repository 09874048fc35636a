"""One encoding stream: from images to features, ahead of the adaptation."""
