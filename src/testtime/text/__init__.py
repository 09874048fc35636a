"""Text: from class names to prototypes, and prompts that can be tuned."""
