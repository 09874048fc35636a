"""Text: from class names to prototypes, and tunable prompts."""
