"""The paper's tables and figures, and yours, as rows of one catalogue, run cell by cell and resumable."""
